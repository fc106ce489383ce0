"""REST of the split: what the console does, for programs; a refusal for every address."""

import json

import pytest

from apps.planning.models import PlannerPolicy, Proposal, SwitchOrder
from apps.planning.services import propose
from controlplane.actors import PLANNER
from tests.factories import make_partition, make_user
from tests.planning.test_services import finish, in_minutes

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition():
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve")
    return partition


@pytest.fixture
def call(client, partition):
    users = {role: make_user(role, role) for role in ("viewer", "operator", "administrator")}

    def call(method, path, role="administrator", **body):
        client.force_login(users[role])
        arguments = {} if method == "get" else {"data": json.dumps(body), "content_type": "application/json"}
        answer = getattr(client, method)(f"/api/v1{path}", **arguments)
        return answer.status_code, answer.json()

    return call


def test_the_split_can_be_read_by_viewers(call):
    status, split = call("get", "/split/gb300", "viewer")
    assert status == 200
    assert split["current"]["prefill"] == ["gb300-1", "gb300-2"]
    assert split["policy"]["mode"] == "approve"
    assert (split["proposed"], split["forced"], split["last_decision"]) == (None, None, None)


def test_a_node_is_forced_and_released(call):
    status, split = call("put", "/nodes/gb300-2/phase", phase="decode", reason="maintenance", expires_in_s=600)
    assert (status, split["forced"]["phases"]) == (200, {"gb300-2": "decode"})
    assert split["active_orders"][0]["steps"][0]["to_phase"] == "decode"
    status, split = call("delete", "/split/gb300/force?reason=done")
    assert (status, split["forced"]) == (200, None)


def test_a_split_is_forced_by_number_or_by_names(call):
    status, split = call("put", "/split/gb300/force", prefill_nodes=1, reason="long answers")
    assert (status, split["forced"]["prefill"]) == (200, ["gb300-1"])
    status, split = call("put", "/split/gb300/force", prefill_nodes=["gb300-3"], reason="that one")
    assert (status, split["forced"]["prefill"]) == (200, ["gb300-3"])


def test_a_proposal_is_approved_and_its_switch_rolled_back(call, partition):
    proposal = propose(partition, 3, PLANNER, "more prompts", in_minutes(5))
    status, answer = call("post", f"/split/gb300/proposals/{proposal.pk}/approve", "operator")
    assert (status, answer["state"], answer["votes"][0]["actor"]) == (200, "approved", "operator")
    order = finish(SwitchOrder.objects.get())
    status, undo = call("post", f"/split/gb300/orders/{order.pk}/rollback", "operator", reason="worse")
    assert (status, undo["rolls_back"], undo["to"]["prefill"]) == (200, order.pk, ["gb300-1", "gb300-2"])
    status, orders = call("get", "/split/gb300/orders", "viewer")
    assert [row["id"] for row in orders["items"]] == [undo["id"], order.pk]
    status, one = call("get", f"/split/gb300/orders/{order.pk}", "viewer")
    assert one["from"]["prefill"] == ["gb300-1", "gb300-2"]


def test_a_person_proposes_and_another_rejects(call):
    body = {"prefill_nodes": 3, "reason": "try it", "expires_at": in_minutes(5).isoformat()}
    status, proposal = call("post", "/split/gb300/proposals", "operator", **body)
    assert status == 201
    status, answer = call("post", f"/split/gb300/proposals/{proposal['id']}/approve", "operator")
    assert (status, answer["code"]) == (403, "forbidden")
    status, answer = call("post", f"/split/gb300/proposals/{proposal['id']}/reject", reason="no")
    assert (status, answer["state"]) == (200, "rejected")
    status, listed = call("get", "/split/gb300/proposals", "viewer")
    assert len(listed["items"]) == 1


def test_freeze_and_mode(call):
    status, policy = call("put", "/split/gb300/freeze", reason="release", until=in_minutes(10).isoformat())
    assert (status, policy["mode"], policy["thaw_mode"]) == (200, "frozen", "approve")
    assert call("delete", "/split/gb300/freeze?reason=over")[1]["mode"] == "approve"
    assert call("put", "/split/gb300/mode", mode="automatic", reason="trust")[1]["mode"] == "automatic"
    assert call("patch", "/split/gb300/policy", cooldown_s=5)[1]["cooldown_s"] == 5


def test_decisions_are_listed_newest_first(call):
    assert call("get", "/split/gb300/decisions", "viewer") == (200, {"items": [], "next_cursor": None})


REFUSED = [
    ("get", "/split/elsewhere", {}, 404, "not-found"),
    ("get", "/split/gb300/orders/999999", {}, 404, "not-found"),
    ("get", "/split/gb300/decisions?limit=0", {}, 422, "invalid-field"),
    ("get", "/split/gb300/orders?cursor=x", {}, 422, "invalid-field"),
    ("get", "/split/gb300/proposals?cursor=x", {}, 422, "invalid-field"),
    ("put", "/split/gb300/force", {"prefill_nodes": 9, "reason": "x"}, 422, "invalid-field"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1}, 422, "invalid-field"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_in_s": -1}, 422, "invalid-field"),
    ("put", "/split/gb300/force", {"prefill_nodes": [], "reason": "x"}, 409, "phase-left-empty"),
    ("put", "/nodes/nowhere/phase", {"phase": "decode", "reason": "x"}, 404, "not-found"),
    ("put", "/nodes/gb300-1/phase", {"phase": "asleep", "reason": "x"}, 422, "invalid-field"),
    ("put", "/nodes/gb300-1/phase", {"phase": "decode", "reason": "x", "surprise": 1}, 422, "invalid-field"),
    ("put", "/split/gb300/freeze", {"reason": "x", "until": "2001-01-01T00:00:00Z"}, 422, "invalid-field"),
    ("put", "/split/gb300/freeze", {"reason": ""}, 422, "invalid-field"),
    ("delete", "/split/gb300/freeze", {}, 409, "not-frozen"),
    ("put", "/split/gb300/mode", {"mode": "wild"}, 422, "invalid-field"),
    ("patch", "/split/gb300/policy", {"slice_s": 0}, 422, "invalid-field"),
    ("patch", "/split/gb300/policy", {"slice_s": None}, 422, "invalid-field"),
    ("post", "/split/gb300/proposals/999999/approve", {}, 404, "not-found"),
    ("post", "/split/gb300/proposals/999999/reject", {"reason": "x"}, 404, "not-found"),
    ("post", "/split/gb300/orders/999999/rollback", {"reason": "x"}, 404, "not-found"),
    ("post", "/split/gb300/orders/99999999999999999999/rollback", {"reason": "x"}, 404, "not-found"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), REFUSED)
def test_a_bad_request_is_refused_with_its_code(call, method, path, body, status, code):
    answered, problem = call(method, path, **body)
    assert (answered, problem["code"]) == (status, code), problem


LONG_AGO, LATER = "2001-01-01T00:00:00Z", "2099-01-01T00:00:00Z"
# In UTC past the year 9999: the database would keep it and never give it back.
NEVER = "9999-12-31T23:00:00-02:00"
MALFORMED = [
    ("put", "/split/gb300/force", {"prefill_nodes": True, "reason": "x"}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": [True], "reason": "x"}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1.5, "reason": "x"}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": 10**30, "reason": "x"}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": ["nobody"], "reason": "x"}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": " "}, "reason"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x" * 501}, "reason"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_at": LONG_AGO}, "expires_at"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_at": "2099-01-01"}, "expires_at"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_in_s": 1e308}, "expires_in_s"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_in_s": True}, "expires_in_s"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_in_s": float("nan")}, "expires_in_s"),
    ("put", "/nodes/gb300-2/phase", {"phase": 3, "reason": "x"}, "phase"),
    ("put", "/nodes/gb300-2/phase", {"phase": "decode", "reason": "x", "expires_at": LONG_AGO}, "expires_at"),
    ("put", "/split/gb300/freeze", {"reason": "x", "until": "soon"}, "until"),
    ("put", "/split/gb300/freeze", {"reason": "x" * 501}, "reason"),
    ("put", "/split/gb300/mode", {"mode": "frozen"}, "reason"),
    ("delete", "/split/gb300/force?reason=" + "x" * 501, {}, "reason"),
    ("post", "/split/gb300/proposals", {"prefill_nodes": True, "reason": "x", "expires_at": LATER}, "prefill_nodes"),
    ("post", "/split/gb300/proposals", {"prefill_nodes": 1, "reason": "x", "expires_at": LONG_AGO}, "expires_at"),
    ("post", "/split/gb300/proposals", {"prefill_nodes": 1, "reason": "x", "expires_in_s": 0}, "expires_in_s"),
    ("post", "/split/gb300/dry-runs", {"prefill_nodes": False}, "prefill_nodes"),
    ("post", "/split/gb300/dry-runs", {"prefill_nodes": {"a": 1}}, "prefill_nodes"),
    ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x", "expires_at": NEVER}, "expires_at"),
    ("put", "/nodes/gb300-2/phase", {"phase": "decode", "reason": "x", "expires_at": NEVER}, "expires_at"),
    ("put", "/split/gb300/freeze", {"reason": "x", "until": NEVER}, "until"),
    ("post", "/split/gb300/proposals", {"prefill_nodes": 1, "reason": "x", "expires_at": NEVER}, "expires_at"),
    ("patch", "/split/gb300/policy", {"approvals_required": True}, "approvals_required"),
    ("patch", "/split/gb300/policy", {"approvals_required": 2**63}, "approvals_required"),
    ("patch", "/split/gb300/policy", {"cooldown_s": True}, "cooldown_s"),
    ("patch", "/split/gb300/policy", {"cooldown_s": float("inf")}, "cooldown_s"),
    ("patch", "/split/gb300/policy", {"slo_ttft_s": float("nan")}, "slo_ttft_s"),
    ("patch", "/split/gb300/policy", {"min_utilisation": 1.01}, "min_utilisation"),
    ("patch", "/split/gb300/policy", {"self_approval": "perhaps"}, "self_approval"),
    ("patch", "/split/gb300/policy", {"mode": "automatic"}, "mode"),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), MALFORMED)
def test_what_is_malformed_is_refused_by_the_name_of_its_field(call, method, path, body, field):
    status, problem = call(method, path, **body)
    named = problem["errors"][0]["field"] if problem["errors"] else problem
    assert (status, problem["code"], named.split(".")[0]) == (422, "invalid-field", field), problem
    assert PlannerPolicy.objects.get().mode == "approve" and not SwitchOrder.objects.exists()


def test_what_belongs_to_another_partition_is_not_found(call, partition):
    other = make_partition("other", ("prefill", "prefill", "decode", "decode"))
    proposal = propose(other, 3, PLANNER, "more prompts", in_minutes(5))
    for verb in ("approve", "reject"):
        status, problem = call("post", f"/split/gb300/proposals/{proposal.pk}/{verb}", "operator", reason="x")
        assert (status, problem["code"]) == (404, "not-found")
    names = [node.name for node in other.nodes.all()]
    status, problem = call("put", "/split/gb300/force", prefill_nodes=names[:1], reason="x")
    assert (status, problem["errors"][0]["field"]) == (422, "prefill_nodes")


def test_what_is_decided_is_not_decided_twice(call, partition):
    proposal = propose(partition, 3, PLANNER, "more prompts", in_minutes(5))
    address = f"/split/gb300/proposals/{proposal.pk}"
    assert call("post", f"{address}/approve", "viewer")[0] == 403
    assert call("post", f"{address}/approve", "operator")[0] == 200
    assert call("post", f"{address}/approve", "operator")[1]["code"] == "proposal-closed"
    assert call("post", f"{address}/reject", reason="late")[1]["code"] == "proposal-closed"
    order = SwitchOrder.objects.get()
    assert call("post", f"/split/gb300/orders/{order.pk}/rollback", "viewer", reason="x")[0] == 403
    assert call("post", f"/split/gb300/orders/{order.pk}/rollback", "operator", reason="x")[0] == 200
    assert call("post", f"/split/gb300/orders/{order.pk}/rollback", "operator", reason="x")[0] == 409


def test_a_policy_that_was_edited_meanwhile_is_not_overwritten(client, call):
    call("get", "/split/gb300/policy")
    seen = client.get("/api/v1/split/gb300/policy")["ETag"]
    assert call("put", "/split/gb300/freeze", reason="release")[0] == 200
    answer = client.patch(
        "/api/v1/split/gb300/policy", '{"cooldown_s": 7}', content_type="application/json", headers={"If-Match": seen}
    )
    assert (answer.status_code, PlannerPolicy.objects.get().cooldown_s) == (412, 120.0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("put", "/split/gb300/force", {"prefill_nodes": 1, "reason": "x"}),
        ("put", "/nodes/gb300-2/phase", {"phase": "decode", "reason": "x"}),
        ("delete", "/split/gb300/force", {}),
        ("put", "/split/gb300/freeze", {"reason": "x"}),
        ("put", "/split/gb300/mode", {"mode": "automatic"}),
        ("patch", "/split/gb300/policy", {"cooldown_s": 1}),
    ],
)
def test_operators_cannot_force_or_freeze(call, method, path, body):
    status, problem = call(method, path, "operator", **body)
    assert (status, problem["code"]) == (403, "forbidden")
    assert not SwitchOrder.objects.exists() and not Proposal.objects.exists()
