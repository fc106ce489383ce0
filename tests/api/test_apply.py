"""Configuration as YAML: exported, compared and applied, all documents or none."""

import pytest
import yaml

from apps.planning.models import PlannerPolicy
from apps.tenancy.models import Tenant
from apps.topology.configuration import latest
from apps.topology.models import ConfigurationVersion, Node, Partition
from controlplane.api import api
from controlplane.manifests.kinds import FLOW_KINDS, KINDS
from tests.factories import make_partition

pytestmark = pytest.mark.django_db


def document(kind, name, **spec):
    return {"apiVersion": "switchyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def apply(rest):
    def apply(*documents, role="administrator", **more):
        text = documents[0] if isinstance(documents[0], str) else yaml.safe_dump_all(documents)
        return rest("post", "/apply", {"yaml": text, "reason": "a test"} | more, role=role)

    return apply


def paths(answer):
    return {change["path"]: (change["before"], change["after"]) for change in answer["changes"]}


def test_what_was_exported_changes_nothing_when_it_is_applied_again(rest, apply):
    status, text = rest("get", "/partitions/gb300/manifests", role="viewer")
    assert status == 200
    kinds = {found["kind"] for found in yaml.safe_load_all(text)}
    assert kinds == {*KINDS, *FLOW_KINDS}
    status, answer = apply(text)
    assert (status, answer["changes"], answer["versions"]) == (200, [], {})


def test_every_kind_is_applied_at_once_and_each_change_is_named(apply, partition):
    objective = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "nightly"},
        "spec": {"priority": -50},
    }
    status, answer = apply(
        document("Tenant", "acme", weight=3),
        document("Tenant", "umbrella", title="Umbrella", paused=True),
        document("Partition", "gb300", routing_policy="sticky"),
        document("Node", "gb300-1", decode_limit=7),
        document("Node", "gb300-9", url="http://h:1/nodes/gb300-9", engine="simulated", phase="decode"),
        document("PlannerPolicy", "gb300", cooldown_s=5, mode="advisory"),
        objective,
    )
    assert status == 200, answer
    assert answer["applied"]
    found = paths(answer)
    assert found["Tenant/acme.weight"] == (1.0, 3.0)
    assert found["Tenant/umbrella.paused"] == (None, True)
    assert found["Partition/gb300.routing_policy"][1] == "sticky"
    assert found["Node/gb300-1.decode_limit"][1] == 7
    assert found["Node/gb300-9.phase"] == (None, "decode")
    assert found["PlannerPolicy/gb300.mode"] == ("approve", "advisory")
    assert found["FlowControl/gb300.objectives[nightly].band"] == (None, "spare")
    assert answer["versions"] == {"gb300": ConfigurationVersion.objects.order_by("-version").first().version}
    assert PlannerPolicy.objects.get(partition=partition).cooldown_s == 5


def versions():
    return dict(ConfigurationVersion.objects.order_by("version").values_list("partition__name", "version"))


def test_however_much_is_applied_it_is_one_version_of_each_partition(apply):
    make_partition("other", ("prefill", "decode"))
    before = versions()
    status, answer = apply(
        document("Tenant", "acme", weight=3),
        document("Tenant", "umbrella", title="Umbrella"),
        document("Partition", "gb300", routing_policy="sticky"),
        *(document("Node", f"gb300-{n}", decode_limit=7) for n in (1, 2, 3)),
        document("PlannerPolicy", "gb300", slo_ttft_s=4),
    )
    assert status == 200, answer
    after = versions()
    assert after == {"gb300": before["gb300"] + 1, "other": before["other"] + 1} == answer["versions"]
    newest = latest(Partition.objects.get(name="gb300"))
    assert (newest.reason, newest.document["slo"]["ttft_s"]) == ("a test", 4)
    assert [node["decode_limit"] for node in newest.document["nodes"]][:3] == [7, 7, 7]


def test_a_part_that_fails_late_leaves_no_version_and_no_row(apply):
    before = versions()
    wrong = document("Node", "gb300-4", enabled=False), document("Node", "gb300-3", enabled=False)
    status, problem = apply(document("Tenant", "umbrella"), document("Tenant", "acme", weight=3), *wrong)
    assert (status, problem["code"]) == (409, "last-of-phase")
    assert (versions(), Tenant.objects.filter(name="umbrella").exists()) == (before, False)
    assert Tenant.objects.get(name="acme").weight == 1.0


def test_a_dry_run_says_the_same_and_changes_nothing(apply):
    wanted = [document("Tenant", "acme", weight=3), document("Node", "gb300-1", draining=True)]
    versions = ConfigurationVersion.objects.count()
    dry = apply(*wanted, dry_run=True)[1]
    assert (dry["applied"], dry["versions"]) == (False, {})
    assert (Tenant.objects.get(name="acme").weight, Node.objects.get(name="gb300-1").draining) == (1.0, False)
    assert ConfigurationVersion.objects.count() == versions
    assert apply(*wanted)[1]["changes"] == dry["changes"]


def test_one_wrong_document_and_nothing_is_applied(apply):
    status, problem = apply(document("Tenant", "acme", weight=3), document("Node", "gb300-1", decode_limit=-1))
    assert (status, problem["errors"][0]["field"]) == (422, "Node/gb300-1.spec.decode_limit")
    assert Tenant.objects.get(name="acme").weight == 1.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (document("Pod", "x"), "documents[0].kind"),
        (document("Tenant", "acme", wieght=3), "Tenant/acme.spec.wieght"),
        (document("Tenant", "acme", weight="x"), "Tenant/acme.spec.weight"),
        (document("Tenant", "acme") | {"apiVersion": "v1"}, "documents[0].apiVersion"),
        ({"kind": "Tenant"}, "documents[0].apiVersion"),
        (document("Tenant", "acme", reason="x"), "Tenant/acme.spec.reason"),
        (document("Node", "gb300-1", engine="vllm"), "Node/gb300-1.spec.engine"),
        (document("Node", "new", engine="vllm", phase="decode"), "partition"),
        ("kind: [", "yaml"),
        ("", "yaml"),
        ("- 1", "documents[0]"),
        ("kind: FlowControl", "partition"),
        ("&a [*a]", "yaml"),
        ("kind: Tenant\napiVersion: switchyard/v1\nmetadata: {name: acme}\nspec: &a {title: *a}", "yaml"),
        ("kind: Tenant\napiVersion: switchyard/v1\nmetadata: {name: acme}\nspec: {1: 2}", "documents[0].spec.1.[key]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(apply, wrong, field):
    status, problem = apply(wrong)
    assert (status, problem["errors"][0]["field"]) == (422, field), problem


def test_a_document_given_twice_is_refused(apply):
    status, problem = apply(document("Tenant", "acme", weight=3), document("Tenant", "acme", weight=4))
    assert (status, problem["errors"][0]["field"]) == (422, "Tenant/acme")


def test_an_operator_applies_what_an_operator_may_edit(apply):
    assert apply(document("Tenant", "acme", weight=3, title="Acme"), role="operator")[0] == 403
    assert apply(document("Tenant", "acme", weight=3), role="operator")[0] == 200
    assert apply(document("PlannerPolicy", "gb300", cooldown_s=5), role="operator")[0] == 403
    assert apply(document("Tenant", "acme", weight=2), role="viewer")[0] == 403


def test_the_phase_of_a_node_is_the_splits_and_that_is_said(apply):
    answer = apply(document("Node", "gb300-1", phase="decode"))[1]
    assert answer["changes"] == []
    assert "the split is changed by force or proposal" in answer["notes"][0]


@pytest.mark.parametrize("depth", [50, 400, 3000])
@pytest.mark.parametrize(
    "where", ["{deep}", "kind: {deep}", "kind: Tenant\nspec: {deep}", "kind: FlowControl\nspec: {deep}"]
)
def test_no_depth_of_nesting_is_a_fault_of_the_api(apply, depth, where):
    text = "apiVersion: switchyard/v1\nmetadata: {name: acme}\n" if where != "{deep}" else ""
    assert apply(text + where.format(deep="[" * depth + "]" * depth), partition="gb300")[0] == 422


def test_a_file_is_sent_as_it_is(client, key_of, partition):
    text = yaml.safe_dump(document("Tenant", "acme", weight=3))
    more = {"content_type": "application/yaml", "HTTP_AUTHORIZATION": f"Bearer {key_of('administrator')}"}
    tried = client.post("/api/v1/apply?partition=gb300&dry_run=true", text, **more)
    assert (tried.status_code, tried.json()["applied"]) == (200, False), tried.content
    assert Tenant.objects.get(name="acme").weight != 3
    assert client.post("/api/v1/apply?reason=more+load", text, **more).json()["applied"]
    assert Tenant.objects.get(name="acme").weight == 3
    assert client.post("/api/v1/apply", b"\xff\xfe", **more).status_code == 400
    assert client.post("/api/v1/apply?colour=red", text, **more).status_code == 422


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("application/x-www-form-urlencoded", b"kind: Tenant", "Content-Type: application/yaml"),
        ("text/plain", b"kind: Tenant", "Content-Type: application/yaml"),
        ("application/json", b'{"yaml": ', "line 1 column"),
        ("application/yaml", b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_what_was_expected(client, key_of, partition, kind, body, told):
    """`curl --data-binary @file` alone sends a form's type."""
    key = f"Bearer {key_of('administrator')}"
    answer = client.generic("POST", "/api/v1/apply", body, kind, HTTP_AUTHORIZATION=key)
    assert answer.status_code == 400
    assert told in answer.json()["detail"]


def test_the_description_names_both_kinds_of_body():
    content = api.get_openapi_schema()["paths"]["/api/v1/apply"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "application/yaml"}
