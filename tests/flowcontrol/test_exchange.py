"""Flow control as a whole: YAML out and in, what would change, and back to an earlier version."""

import pytest
import yaml

from apps.flowcontrol import exchange, selectors, services
from apps.topology import configuration
from controlplane.actors import SYSTEM
from controlplane.errors import Conflict, InvalidField, NotFound
from controlplane.permissions import Forbidden
from tests.factories import actor_with, make_partition, make_tenant

pytestmark = pytest.mark.django_db
LLMD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: concurrency-detector
  parameters: {maxConcurrency: 12}
flowControl:
  maxRequests: 2k
  saturationDetector: {pluginRef: concurrency-detector}
  priorityBands:
  - {priority: 100, maxRequests: 1k, fairnessPolicyRef: round-robin-fairness-policy}
  - {priority: 0}
  - {priority: -10, maxRequests: 1Ki}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -10, poolRef: {name: gb300}}
"""


@pytest.fixture
def partition():
    return make_partition()


def published(partition) -> dict:
    return configuration.latest(partition).document


def test_llmds_yaml_becomes_one_version(partition):
    before = configuration.latest(partition).version
    done = exchange.import_yaml(partition, LLMD, actor_with("operator"), "from llm-d")
    document = published(partition)
    assert (done.applied, done.version, document["version"]) == (True, before + 1, before + 1)
    assert document["flow"]["prefill"]["limit_per_node"] == document["flow"]["decode"]["limit_per_node"] == 12
    bands = {band["name"]: band for band in document["bands"]}
    assert [(name, band["priority"], band["max_requests"]) for name, band in bands.items()] == [
        ("premium", 100, 1000),
        ("standard", 0, 5000),
        ("priority-minus-10", -10, 1024),
    ]
    assert {o["name"]: o["band"] for o in document["objectives"]}["batch"] == "priority-minus-10"
    assert configuration.latest(partition).reason == "from llm-d"


def test_a_dry_run_says_what_would_change_and_changes_nothing(partition):
    version = configuration.latest(partition).version
    told = exchange.import_yaml(partition, LLMD, SYSTEM, dry_run=True)
    changes = {change.path: (change.before, change.after) for change in told.changes}
    assert changes["flow.max_requests"] == (5000, 2000)
    assert changes["bands[premium].ttl_s"] == (60.0, None)
    assert changes["bands[priority-minus-10].priority"] == (None, -10)
    assert (told.applied, told.version) == (False, None)
    assert configuration.latest(partition).version == version
    assert selectors.flow_settings_of(partition).max_requests == 5000
    assert not partition.bands.filter(priority=-10).exists()


def test_what_is_exported_changes_nothing_when_imported(partition):
    services.update_flow_settings(partition, SYSTEM, prefill_mode="hybrid", prefill_limit_per_node=None)
    services.update_band(selectors.band_named(partition, "premium"), SYSTEM, ceiling=0.9, min_share=0.2)
    text = exchange.export_yaml(partition)
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    assert kinds == ["EndpointPickerConfig", "FlowControl", "InferenceObjective", "InferenceObjective"]
    assert exchange.import_yaml(partition, text, SYSTEM).changes == []


def test_an_export_moves_to_another_partition(partition):
    services.update_band(selectors.band_named(partition, "premium"), SYSTEM, fairness="token-fair", priority=70)
    other = make_partition("laptop", ("mixed",))
    text = exchange.export_yaml(partition)
    with pytest.raises(InvalidField, match="the pool 'laptop'"):
        exchange.import_yaml(other, text, SYSTEM)
    exchange.import_yaml(other, text, SYSTEM, pool="gb300")
    assert selectors.flow_document(other) == selectors.flow_document(partition)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "yaml"),
        ("", "documents"),
        ("kind: Pod", "documents[0].kind"),
        (LLMD.replace("2k", "many"), "flowControl.maxRequests"),
        (LLMD.replace("round-robin-fairness-policy", "luck"), "flowControl.priorityBands[0].fairnessPolicyRef"),
        (LLMD.replace("maxConcurrency: 12", "maxSpeed: 12"), "plugins[0].parameters.maxSpeed"),
        (LLMD.replace("maxRequests: 1Ki", "maxRequests: 9T"), "bands[priority-minus-10].max_requests"),
        ("a: &a [*a]", "yaml"),
        ("[" * 5000, "yaml"),
        (LLMD.replace("[flowControl]", "5"), "featureGates"),
        (LLMD.replace("2k", "1.0e+300"), "flowControl.maxRequests"),
        (LLMD.replace("name: batch", "name: " + "x" * 300), f"objectives[{'x' * 300}].name"),
        (LLMD.replace("name: batch", r'name: "a\0b"'), "objectives[a\0b].name"),
        (
            LLMD.replace("priority: -10, maxRequests: 1Ki", "priority: -10000000000"),
            "bands[priority-minus-10000000000].priority",
        ),
        (LLMD.replace("featureGates: [flowControl]", "flowControlTTL: " + "9" * 5000), "yaml"),
    ],
)
def test_a_bad_document_changes_nothing_and_names_the_field(partition, text, field):
    before = published(partition)
    with pytest.raises(InvalidField) as refusal:
        exchange.import_yaml(partition, text, SYSTEM)
    assert refusal.value.field == field
    assert published(partition) == before
    assert selectors.flow_settings_of(partition).max_requests == 5000


def test_viewers_cannot_import(partition):
    with pytest.raises(Forbidden):
        exchange.import_yaml(partition, LLMD, actor_with("viewer"))


def test_an_earlier_version_comes_back_as_a_new_one(partition):
    good = configuration.latest(partition)
    exchange.import_yaml(partition, LLMD, SYSTEM)
    services.set_priorities(partition, {"premium": 0, "standard": 100}, SYSTEM)
    told = exchange.revert(partition, good.version, SYSTEM, dry_run=True)
    assert ("bands[premium].priority", 0, 100) in [(c.path, c.before, c.after) for c in told.changes]
    done = exchange.revert(partition, good.version, actor_with("operator"))
    now = configuration.latest(partition)
    assert done.version == now.version == good.version + 3
    assert now.reason == f"back to version {good.version}"
    sections = ("bands", "objectives", "default_band", "flow")
    assert {name: now.document[name] for name in sections} == {name: good.document[name] for name in sections}


def test_a_version_of_before_a_field_existed_can_come_back(partition):
    old = configuration.latest(partition)
    for stage in ("prefill", "decode"):
        del old.document["flow"][stage]["token_limit_per_node"]
    del old.document["flow"]["ceilings"]
    for band in old.document["bands"]:
        del band["ttft_budget_s"]
    old.save()
    services.update_flow_settings(partition, SYSTEM, prefill_token_limit_per_node=5, ceiling_policy="priority-holdback")
    exchange.revert(partition, old.version, SYSTEM)
    flow = published(partition)["flow"]
    assert (flow["prefill"]["token_limit_per_node"], flow["ceilings"]["policy"]) == (None, "static")


def test_only_flow_control_is_set_back(partition):
    version = configuration.latest(partition).version
    make_tenant("acme", weight=3.0)
    services.update_band(selectors.band_named(partition, "premium"), SYSTEM, priority=70)
    exchange.revert(partition, version, SYSTEM)
    assert [tenant["weight"] for tenant in published(partition)["tenants"]] == [3.0]


def test_a_tenants_default_objective_stays(partition):
    version = configuration.latest(partition).version
    services.create_objective(partition, "chat", selectors.band_named(partition, "premium"), SYSTEM)
    make_tenant("acme", default_objective="chat")
    with pytest.raises(Conflict, match="objective chat is the default of acme"):
        exchange.revert(partition, version, SYSTEM)


def test_an_unknown_version_is_said(partition):
    with pytest.raises(NotFound, match="no configuration version"):
        exchange.revert(partition, 999, SYSTEM)
