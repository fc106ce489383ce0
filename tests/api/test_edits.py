"""Edits: what they change and publish, what they refuse and by which field, and edits of something older."""

import json

import pytest

from apps.topology.configuration import latest
from controlplane.actors import SYSTEM
from tests.api.conftest import is_problem

pytestmark = pytest.mark.django_db
GATEWAY = "/partitions/gb300"
TAGGED = [
    ("/tenants/acme", {"weight": 2}, {"weight": 3}),
    (GATEWAY, {"title": "one"}, {"title": "two"}),
    ("/nodes/gb300-1", {"decode_limit": 2}, {"decode_limit": 3}),
    (f"{GATEWAY}/bands/premium", {"priority": 2}, {"priority": 3}),
    (f"{GATEWAY}/objectives/premium", {"ttl_s": 2}, {"ttl_s": 3}),
    (f"{GATEWAY}/flow-settings", {"max_requests": 2000}, {"max_requests": 3000}),
    ("/split/gb300/policy", {"cooldown_s": 2}, {"cooldown_s": 3}),
]


@pytest.mark.parametrize(("path", "first", "second"), TAGGED)
def test_an_edit_of_something_older_is_refused_and_changes_nothing(rest, path, first, second):
    seen = rest.answer("get", path)["ETag"]
    mine = rest.answer("patch", path, first, If_Match=seen)
    assert mine.status_code == 200
    assert mine["ETag"] != seen

    theirs = rest.answer("patch", path, second, If_Match=seen)
    assert (theirs.status_code, json.loads(theirs.content)["code"]) == (412, "precondition-failed")
    assert is_problem(theirs)

    now = rest.answer("get", path)
    assert now["ETag"] == mine["ETag"]
    name, value = next(iter(first.items()))
    assert json.loads(now.content)[name] == value


@pytest.mark.parametrize(("path", "first", "second"), TAGGED)
def test_the_tag_of_an_edits_answer_serves_for_the_next_edit(rest, path, first, second):
    tag = rest.answer("patch", path, first)["ETag"]
    assert rest("patch", path, second, If_Match=f'"another", {tag}')[0] == 200
    assert rest("patch", path, first, If_Match="*")[0] == 200


@pytest.mark.parametrize("path", [f"{GATEWAY}/bands/spare", f"{GATEWAY}/objectives/premium"])
def test_something_changed_meanwhile_is_not_deleted(rest, path):
    seen = rest.answer("get", path)["ETag"]
    rest("patch", path, {"ttl_s": 9})
    assert rest("delete", path, If_Match=seen)[0] == 412
    assert rest("delete", path, If_Match=rest.answer("get", path)["ETag"])[0] == 204
    assert rest("get", path)[0] == 404


def test_what_a_node_reports_does_not_spoil_an_edit(rest, partition):
    tag = rest.answer("get", "/nodes/gb300-1")["ETag"]
    partition.nodes.filter(name="gb300-1").update(observed_phase="prefill", observed_state="ready")
    assert rest("patch", "/nodes/gb300-1", {"decode_limit": 4}, If_Match=tag)[0] == 200


# -- what is published -----------------------------------------------------------------------------------------------


def test_a_bands_new_priority_is_published_at_once_with_who_and_why(
    rest, partition, redis_client, django_capture_on_commit_callbacks
):
    before = latest(partition).version
    told = redis_client.pubsub()
    told.subscribe("switchyard:gb300:config-changed")
    told.get_message(timeout=2)
    with django_capture_on_commit_callbacks(execute=True):
        status, band = rest("patch", f"{GATEWAY}/bands/standard", {"priority": 500, "reason": "rush"}, role="operator")
    assert (status, band["priority"]) == (200, 500)

    version = latest(partition)
    assert (version.version, version.author, version.reason) == (before + 1, "operator", "rush")
    sent = json.loads(redis_client.get("switchyard:gb300:config"))
    assert sent == version.document
    assert [(b["name"], b["priority"]) for b in sent["bands"]] == [("standard", 500), ("premium", 100), ("spare", -50)]
    assert told.get_message(timeout=2)["data"] == str(version.version)
    told.close()


def test_an_edit_that_changes_nothing_publishes_nothing(rest, partition):
    before = latest(partition).version
    assert rest("patch", f"{GATEWAY}/bands/standard", {"priority": 0})[0] == 200
    assert rest("patch", f"{GATEWAY}/bands/standard", {})[0] == 200
    assert latest(partition).version == before


@pytest.mark.parametrize(
    ("method", "path", "body", "section", "expected"),
    [
        ("patch", "/nodes/gb300-1", {"draining": True}, "nodes", {"name": "gb300-1", "draining": True}),
        ("post", "/nodes/gb300-1/drain", {}, "nodes", {"name": "gb300-1", "draining": True}),
        ("patch", GATEWAY, {"routing_policy": "sticky"}, "routing", {"policy": "sticky"}),
        ("patch", GATEWAY, {"lease": {"multiple": 2, "floor_s": 1, "ceiling_s": 9}}, "lease", {"multiple": 2}),
        ("post", "/tenants/acme/pause", {}, "tenants", {"name": "acme", "paused": True}),
        ("patch", "/tenants/acme", {"weight": 5}, "tenants", {"name": "acme", "weight": 5}),
        ("post", "/tenants/acme/keys", {"name": "k", "trusted": True}, "keys", {"tenant": "acme", "trusted": True}),
        ("post", f"{GATEWAY}/bands", {"name": "bulk", "priority": 3}, "bands", {"name": "bulk", "priority": 3}),
        ("patch", f"{GATEWAY}/objectives/premium", {"slo_ttft_s": 2}, "objectives", {"slo_ttft_s": 2}),
        ("patch", f"{GATEWAY}/flow-settings", {"displacement": False}, "flow", {"displacement": False}),
        ("patch", f"{GATEWAY}/flow-settings", {"default_band": {"ttl_s": 4}}, "default_band", {"ttl_s": 4}),
    ],
)  # fmt: skip
def test_an_edit_is_in_the_next_configuration(rest, partition, method, path, body, section, expected):
    before = latest(partition).version
    assert rest(method, path, body)[0] < 300
    version = latest(partition)
    assert version.version == before + 1
    part = version.document[section]
    rows = part if isinstance(part, list) else [part]
    assert any(expected.items() <= row.items() for row in rows), part


def test_bands_trade_priorities_in_one_configuration(rest, partition):
    before = latest(partition).version
    swapped = {"priorities": {"premium": 0, "standard": 100}}
    assert rest("patch", f"{GATEWAY}/bands/premium", {"priority": 0})[1]["code"] == "priority-taken"
    status, bands = rest("put", f"{GATEWAY}/band-priorities", swapped, role="operator")
    assert (status, [band["name"] for band in bands]) == (200, ["standard", "premium", "spare"])
    assert latest(partition).version == before + 1


def test_an_operator_edits_the_weight_of_a_tenant_but_not_its_sharing_domain(rest):
    assert rest("patch", "/tenants/acme", {"weight": 2}, role="operator")[0] == 200
    status, problem = rest("patch", "/tenants/acme", {"sharing_domain": "all"}, role="operator")
    assert (status, problem["code"]) == (403, "forbidden")


def test_who_changed_what_and_why_is_in_the_audit_trail(rest):
    rest("patch", f"{GATEWAY}/bands/standard", {"priority": 9, "reason": "rush"}, X_Request_ID="req-9")
    from apps.flowcontrol.models import BandEvent  # made by the audit trail's decorator

    event = BandEvent.objects.order_by("-pgh_id").first()
    context = event.pgh_context.metadata
    assert event.priority == 9
    assert (context["actor"], context["reason"], context["request_id"]) == ("administrator", "rush", "req-9")


def test_a_rotated_key_has_the_rights_of_the_old_one_which_is_dead(rest, key_of):
    old = key_of("operator")
    number = rest("get", "/tenants/acme/keys")[1]["items"][0]["id"]
    status, body = rest("post", f"/keys/{number}/rotate", {"reason": "leaked"})
    assert (status, body["key"]["role"], body["key"]["name"]) == (201, "operator", "operator-key")
    assert rest("get", "/me", key=old)[0] == 401
    assert rest("get", "/me", key=body["secret"])[1]["roles"] == ["operator"]
    assert rest("post", f"/keys/{number}/rotate", {})[1]["code"] == "key-not-live"


# -- what is refused -------------------------------------------------------------------------------------------------

FIELDS = [
    ("post", "/tenants", {}, "name"),
    ("post", "/tenants", {"name": "has space"}, "name"),
    ("post", "/tenants", {"name": "x" * 64}, "name"),
    ("post", "/tenants", {"name": "a", "sharing_domain": "b/c"}, "sharing_domain"),
    ("post", "/tenants", {"name": "a", "default_objective": "nope"}, "default_objective"),
    ("post", "/tenants", {"name": "a", "surprise": 1}, "surprise"),
    ("patch", "/tenants/acme", {"weight": 0}, "weight"),
    ("patch", "/tenants/acme", {"weight": None}, "weight"),
    ("patch", "/tenants/acme", {"title": None}, "title"),
    ("patch", "/tenants/acme", {"weight": "heavy"}, "weight"),
    ("patch", "/tenants/acme", '{"weight": NaN}', "weight"),
    ("patch", "/tenants/acme", {"name": "other"}, "name"),
    ("patch", "/tenants/acme", {"title": "a\x00b"}, "title"),
    ("patch", "/tenants/acme", {"reason": "x" * 501}, "reason"),
    ("post", "/tenants/acme/keys", {"name": ""}, "name"),
    ("post", "/tenants/acme/keys", {"name": "k", "expires_at": "9999-12-31T23:00:00-02:00"}, "expires_at"),
    ("post", "/tenants/acme/keys", {"name": "k", "expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
    ("post", "/tenants/acme/keys", {"name": "k", "role": "king"}, "role"),
    ("post", "/tenants/acme/keys", {"name": "k", "objectives": []}, "objectives"),
    ("post", "/tenants/acme/keys", {"name": "k", "objectives": ["nope"]}, "objectives"),
    ("post", "/tenants/acme/keys", {"name": "k", "expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
    ("post", "/tenants/acme/keys", {"name": "k", "expires_at": "2101-01-01T00:00:00"}, "expires_at"),
    ("post", "/keys/first/revoke", {}, "key_id"),
    ("patch", GATEWAY, {"routing_policy": "best"}, "routing_policy"),
    ("patch", GATEWAY, {"lease": {"multiple": -1, "floor_s": 1, "ceiling_s": 1}}, "lease"),
    ("patch", GATEWAY, {"lease": {"multiple": 1, "ceiling_s": 9}}, "lease.floor_s"),
    ("patch", GATEWAY, {"lease": {"multiple": 1, "floor_s": 1, "ceiling_s": 1, "more": 1}}, "lease.more"),
    ("patch", GATEWAY, {"lease": None}, "lease"),
    ("patch", "/nodes/gb300-1", {"decode_limit": 0}, "decode_limit"),
    ("patch", "/nodes/gb300-1", {"enabled": None}, "enabled"),
    ("patch", "/nodes/gb300-1", {"url": "elsewhere"}, "url"),
    ("get", f"{GATEWAY}/configurations/first", None, "version"),
    ("post", f"{GATEWAY}/bands", {"name": "bulk"}, "priority"),
    ("post", f"{GATEWAY}/bands", {"name": "bulk", "priority": 2**31}, "priority"),
    ("post", f"{GATEWAY}/bands", {"name": "bulk", "priority": 1, "fairness": "none"}, "fairness"),
    ("patch", f"{GATEWAY}/bands/premium", {"ttl_s": 0}, "ttl_s"),
    ("patch", f"{GATEWAY}/bands/premium", {"ceiling": 1.5}, "ceiling"),
    ("patch", f"{GATEWAY}/bands/premium", {"max_requests": 0}, "max_requests"),
    ("patch", f"{GATEWAY}/bands/premium", {"priority": 1.5}, "priority"),
    ("patch", f"{GATEWAY}/bands/premium", {"priority": None}, "priority"),
    ("put", f"{GATEWAY}/band-priorities", {"priorities": {"nope": 1}}, "priorities"),
    ("put", f"{GATEWAY}/band-priorities", {"priorities": {"premium": "high"}}, "priorities.premium"),
    ("put", f"{GATEWAY}/band-priorities", {"priorities": {"premium": 2**40}}, "priorities.premium"),
    ("post", f"{GATEWAY}/objectives", {"name": "o", "band": "nope"}, "band"),
    ("patch", f"{GATEWAY}/objectives/premium", {"band": None}, "band"),
    ("patch", f"{GATEWAY}/objectives/premium", {"slo_ttft_s": -1}, "slo_ttft_s"),
    ("patch", f"{GATEWAY}/flow-settings", {"max_bytes": 0}, "max_bytes"),
    ("patch", f"{GATEWAY}/flow-settings", {"prefill": {"mode": "guess"}}, "prefill.mode"),
    ("patch", f"{GATEWAY}/flow-settings", {"ceilings": {"policy": "guess"}}, "ceilings.policy"),
    ("patch", f"{GATEWAY}/flow-settings", {"ceilings": {"min_ceiling": 2}}, "ceilings.min_ceiling"),
    ("patch", f"{GATEWAY}/flow-settings", {"decode": {"kv_threshold": 0}}, "decode.kv_threshold"),
    ("post", f"{GATEWAY}/flow-config/import", {"yaml": "kind: Pod"}, "documents[0].kind"),
    ("post", f"{GATEWAY}/flow-config/import", {"yaml": "a: &a [1]\nb: *a"}, "yaml"),
    ("post", f"{GATEWAY}/flow-config/import", {"yaml": "[" * 60 + "]" * 60}, "yaml"),
    ("post", f"{GATEWAY}/flow-config/revert", {"version": "old"}, "version"),
    ("patch", f"{GATEWAY}/flow-settings", {"prefill": {"limit_per_node": 0}}, "prefill.limit_per_node"),
    ("patch", f"{GATEWAY}/flow-settings", {"decode": {"surprise": 1}}, "decode.surprise"),
    ("patch", f"{GATEWAY}/flow-settings", {"default_band": {"ttl_s": "long"}}, "default_band.ttl_s"),
    ("patch", f"{GATEWAY}/flow-settings", {"default_band": {"surprise": 1}}, "default_band.surprise"),
    ("get", f"{GATEWAY}/audit?table=nope", None, "table"),
    ("get", f"{GATEWAY}/requests?since=yesterday", None, "since"),
    ("get", f"{GATEWAY}/requests?limit=501", None, "limit"),
    ("get", "/tenants?limit=ten", None, "limit"),
    ("get", "/tenants?cursor=not-one", None, "cursor"),
]  # fmt: skip


def test_a_bad_value_is_refused_by_the_name_of_its_field(rest, undone):
    wrong = {}
    for method, path, body, field in FIELDS:
        with undone():
            answer = rest.answer(method, path, body)
        problem = json.loads(answer.content)
        named = [each["field"] for each in problem.get("errors", [])]
        if answer.status_code != 422 or not is_problem(answer) or named != [field] or field not in problem["detail"]:
            wrong[f"{method} {path} {body}"] = (answer.status_code, problem)
    assert not wrong


CONFLICTS = [
    ("post", "/tenants", {"name": "acme"}, "already-exists"),
    ("post", f"{GATEWAY}/bands", {"name": "premium", "priority": 5}, "already-exists"),
    ("post", f"{GATEWAY}/bands", {"name": "bulk", "priority": 100}, "priority-taken"),
    ("put", f"{GATEWAY}/band-priorities", {"priorities": {"premium": 0}}, "priority-taken"),
    ("delete", f"{GATEWAY}/bands/premium", None, "band-in-use"),
    ("post", f"{GATEWAY}/objectives", {"name": "premium", "band": "premium"}, "already-exists"),
    ("delete", f"{GATEWAY}/objectives/standard", None, "objective-in-use"),
]


@pytest.mark.parametrize(("method", "path", "body", "code"), CONFLICTS)
def test_what_clashes_with_the_present_state_is_a_conflict(rest, method, path, body, code):
    answer = rest.answer(method, path, body)
    assert (answer.status_code, json.loads(answer.content)["code"]) == (409, code)
    assert is_problem(answer)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/nodes/gb300-2/drain", {}),
        ("patch", "/nodes/gb300-2", {"draining": True}),
        ("patch", "/nodes/gb300-2", {"enabled": False}),
    ],
)
def test_the_last_node_that_prefills_stays_in_service(rest, method, path, body):
    assert rest("post", "/nodes/gb300-1/drain", {})[0] == 200
    status, problem = rest(method, path, body)
    assert (status, problem["code"]) == (409, "last-of-phase")
    assert "prefill" in problem["detail"]
    assert rest("post", "/nodes/gb300-1/undrain", {})[1]["draining"] is False
    assert rest(method, path, body)[0] == 200


def test_a_refused_edit_leaves_no_trace(rest, partition):
    before = latest(partition)
    rest("patch", f"{GATEWAY}/bands/premium", {"priority": 77, "ceiling": 9})
    assert latest(partition) == before
    assert rest("get", f"{GATEWAY}/bands/premium")[1]["priority"] == 100


def test_what_the_gateways_machine_would_refuse_is_refused_in_its_words(rest):
    rest("patch", f"{GATEWAY}/bands/premium", {"min_share": 0.6})
    status, problem = rest("patch", f"{GATEWAY}/bands/standard", {"min_share": 0.6})
    assert (status, problem["errors"][0]["field"]) == (422, "bands")
    assert "min_share of all bands together" in problem["detail"]


def test_an_unknown_address_and_a_wrong_method_are_problems_too(rest):
    for method, path, status, code in (
        ("get", "/nothing", 404, "not-found"),
        ("put", "/tenants", 405, "method-not-allowed"),
    ):
        answer = rest.answer(method, path)
        assert (answer.status_code, json.loads(answer.content)["code"]) == (status, code)
        assert is_problem(answer)
    assert "POST" in rest.answer("put", "/tenants")["Allow"]


def test_a_problem_carries_the_callers_request_id(rest):
    answer = rest.answer("get", "/tenants/nobody", X_Request_ID="mine-1")
    assert answer["X-Request-ID"] == json.loads(answer.content)["request_id"] == "mine-1"


def test_system_made_rows_do_not_depend_on_a_person(partition):
    assert latest(partition).author == str(SYSTEM)
