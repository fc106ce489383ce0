"""llm-d's YAML forms, as documents already loaded: what they mean here, and that writing and reading are inverse."""

from __future__ import annotations

import copy

import pytest

from apps.flowcontrol.domain import llmd
from apps.flowcontrol.domain.config import FlowConfig
from apps.flowcontrol.domain.fields import FlowConfigError
from apps.flowcontrol.domain.llmd.quantities import as_duration, as_quantity, duration_s, quantity

STAGE = {
    "detector": "concurrency", "mode": "requests", "limit_per_node": 4, "token_limit_per_node": None,
    "queue_threshold": 5.0, "kv_threshold": 0.8, "stale_after_s": 3.0, "ttft_budget_s": 5.0,
}  # fmt: skip
TEMPLATE = {
    "fairness": "round-robin", "ordering": "fcfs", "max_requests": 1000, "max_bytes": 10**9, "ttl_s": 60.0,
    "ceiling": 1.0, "min_share": 0.0, "ttft_budget_s": None,
}  # fmt: skip
CURRENT = {
    "bands": [
        {"name": "premium", "priority": 100} | TEMPLATE | {"min_share": 0.0, "ttft_budget_s": 1.5},
        {"name": "standard", "priority": 0} | TEMPLATE,
        {"name": "best-effort", "priority": -10} | TEMPLATE | {"min_share": 0.1},
    ],
    "default_band": dict(TEMPLATE),
    "flow": {
        "max_requests": 5000, "max_bytes": 4 * 10**9, "default_ttl_s": 60.0, "empty_pool_ttl_s": 30.0, "displacement": True,
        "ceilings": {"policy": "static", "min_ceiling": 0.5}, "prefill": STAGE, "decode": STAGE | {"limit_per_node": 64},
    },
    "objectives": [
        {"name": "premium", "band": "premium", "slo_ttft_s": 0.5, "ttl_s": None},
        {"name": "standard", "band": "standard", "slo_ttft_s": None, "ttl_s": 20.0},
    ],
}  # fmt: skip
CONFIG = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "featureGates": ["flowControl"],
    "plugins": [
        {"type": "queue-scorer"},
        {"type": "concurrency-detector", "parameters": {"maxConcurrency": 32, "headroom": 0.2}},
        {"name": "holdback", "type": "priority-holdback-policy", "parameters": {"minCeiling": 0.4}},
    ],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    "flowControl": {
        "maxBytes": "10Gi",
        "maxRequests": "1k",
        "defaultRequestTTL": "1m30s",
        "noEndpointRequestTTL": "10m",
        "saturationDetector": {"pluginRef": "concurrency-detector"},
        "usageLimitPolicyPluginRef": "holdback",
        "defaultPriorityBand": {"maxRequests": 50, "fairnessPolicyRef": "round-robin-fairness-policy"},
        "priorityBands": [
            {"priority": 100, "maxBytes": "500M", "orderingPolicyRef": "slo-deadline-ordering-policy"},
            {"priority": -1, "maxRequests": "0"},
        ],
    },
}


def config(**changes):
    """CONFIG with other values in its flowControl section."""
    changed = copy.deepcopy(CONFIG)
    changed["flowControl"] |= changes
    return changed


def read(*documents, current=CURRENT, pool="gb300"):
    return llmd.read(list(documents), current, pool)


def bands_of(imported) -> dict:
    return {band["name"]: band for band in imported.document["bands"]}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1k", 1000), ("1Ki", 1024), ("500M", 500_000_000), (7, 7), ("0.5", 1), ("2e3", 2000), ("1.5Gi", 1610612736),
     ("100m", 1), ("0", 0)],
)  # fmt: skip
def test_kubernetes_quantities_are_read(text, number):
    assert quantity("x", text) == number


@pytest.mark.parametrize("bad", ["1kb", "-1", "", "ten", None, True, "1 k", "9E", 1.5])
def test_a_bad_quantity_is_named(bad):
    with pytest.raises(FlowConfigError, match=r"flowControl\.maxBytes: expected a Kubernetes quantity"):
        quantity("flowControl.maxBytes", bad)


@pytest.mark.parametrize("number", [0, 1, 999, 1000, 1024, 1536, 4 * 10**9, 2**30, 10**15])
def test_a_written_quantity_is_read_as_the_same_number(number):
    assert quantity("x", as_quantity(number)) == number


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("1m30s", 90), ("500ms", 0.5), ("1.5h", 5400), ("0s", 0)])
def test_durations_are_read_and_written(text, seconds):
    assert duration_s("x", text) == seconds
    assert duration_s("x", as_duration(seconds)) == seconds


@pytest.mark.parametrize("bad", ["9" * 400 + "h", "60", "5 s", "", None, 5, "-1s", "1d"])
def test_a_bad_duration_is_named(bad):
    with pytest.raises(FlowConfigError, match="x: expected a duration"):
        duration_s("x", bad)


def test_limits_gates_and_ceilings_are_taken_over():
    imported = read(CONFIG)
    flow = imported.document["flow"]
    assert (flow["max_bytes"], flow["max_requests"]) == (10 * 2**30, 1000)
    assert (flow["default_ttl_s"], flow["empty_pool_ttl_s"]) == (90.0, 600.0)
    assert flow["prefill"]["limit_per_node"] == flow["decode"]["limit_per_node"] == 32
    assert flow["ceilings"] == {"policy": "priority-holdback", "min_ceiling": 0.4}
    FlowConfig.parse(imported.document)


def test_a_band_is_recognised_by_its_priority_and_keeps_its_name():
    premium = bands_of(read(CONFIG))["premium"]
    assert (premium["fairness"], premium["ordering"]) == ("global-strict", "slo-deadline")
    assert (premium["max_bytes"], premium["max_requests"]) == (500_000_000, 5000), (
        "llm-d's default for what is left out"
    )
    assert premium["ttft_budget_s"] == 1.5, "what the document cannot say stays"
    assert premium["ttl_s"] is None, "llm-d has one TTL for all bands"


def test_a_new_negative_priority_gets_a_band_of_its_own():
    bands = bands_of(read(CONFIG))
    assert bands["priority-minus-1"]["priority"] == -1
    assert bands["priority-minus-1"]["max_requests"] == 5000


def test_a_band_that_is_not_listed_gets_the_default_treatment_while_used_and_goes_otherwise():
    bands = bands_of(read(CONFIG))
    assert bands["standard"]["max_requests"] == 50
    assert "best-effort" not in bands


def test_an_objective_of_an_unknown_priority_gets_a_band_from_the_template_never_another_bands_treatment():
    objective = {
        "apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": "nightly"},
        "spec": {"priority": -7, "poolRef": {"name": "gb300"}},
    }  # fmt: skip
    imported = read(objective)
    assert imported.document["objectives"][-1]["band"] == "priority-minus-7"
    assert bands_of(imported)["priority-minus-7"] == TEMPLATE | {"name": "priority-minus-7", "priority": -7}
    assert set(bands_of(imported)) > {"premium", "standard", "best-effort"}, "objectives alone remove no band"


def test_the_older_group_and_an_unset_priority_are_read():
    objective = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceObjective",
        "metadata": {"name": "premium", "annotations": {"switchyard/slo-ttft": "250ms"}}, "spec": {},
    }  # fmt: skip
    premium = read(objective).document["objectives"][0]
    assert premium == {"name": "premium", "band": "standard", "slo_ttft_s": 0.25, "ttl_s": None}


def test_explicit_ceilings_become_each_bands_own():
    plugin = {
        "type": "priority-holdback-policy",
        "parameters": {"domain": "explicit", "ceilings": {100: 0.9, "-1": 0.3}},
    }
    document = config(usageLimitPolicyPluginRef="priority-holdback-policy")
    document["plugins"].append(plugin)
    bands = bands_of(read(document))
    assert (bands["premium"]["ceiling"], bands["priority-minus-1"]["ceiling"]) == (0.9, 0.3)


@pytest.mark.parametrize(
    ("parameters", "ceilings"),
    [
        ({"shape": "linear", "domain": "rank", "minCeiling": 0.4, "maxCeiling": 0.9}, [0.9, 0.65, 0.4]),
        ({"domain": "value", "minCeiling": 0.4, "maxCeiling": 0.9}, [0.9, 0.445454545, 0.4]),
        ({"domain": "value", "minCeiling": 0.0}, [1.0, 0.090909091, 0.0]),
    ],
)
def test_every_holdback_of_llmds_readme_is_taken_over(parameters, ceilings):
    document = config(
        usageLimitPolicyPluginRef="mine", priorityBands=[{"priority": 100}, {"priority": 0}, {"priority": -10}]
    )
    document["plugins"].append({"name": "mine", "type": "priority-holdback-policy", "parameters": parameters})
    imported = read(document)
    assert imported.document["flow"]["ceilings"]["policy"] == "static"
    assert [band["ceiling"] for band in imported.document["bands"]] == ceilings
    assert any("fixed ceiling" in note for note in imported.notes)
    assert read(*llmd.write(imported.document, "gb300"), current=imported.document).document == imported.document


def test_a_highest_ceiling_below_the_lowest_is_named():
    document = config(usageLimitPolicyPluginRef="mine")
    wrong = {"minCeiling": 0.9, "maxCeiling": 0.4}
    document["plugins"].append({"name": "mine", "type": "priority-holdback-policy", "parameters": wrong})
    with pytest.raises(FlowConfigError, match=r"maxCeiling: expected a number from minCeiling"):
        read(document)


@pytest.mark.parametrize(("gates", "told"), [(["flowControl"], False), (["flowControl=true"], False), ([], True)])
def test_whether_llmd_itself_would_use_the_section_is_said(gates, told):
    notes = read(CONFIG | {"featureGates": gates}).notes
    assert any("featureGates" in note for note in notes) == told


@pytest.mark.parametrize("gates", [5, "flowControl", [{"a": 1}], {"flowControl": True}])
def test_feature_gates_that_are_no_list_are_named(gates):
    with pytest.raises(FlowConfigError, match="featureGates: expected a list of texts"):
        read(CONFIG | {"featureGates": gates})


@pytest.mark.parametrize("field", ["flowControl", "plugins", "featureGates", "saturationDetector", "nonsense"])
def test_a_value_that_stands_for_a_mountain_of_text_is_not_told_whole(field):
    mountain: object = ["x"] * 10
    for _ in range(5):
        mountain = [mountain] * 10
    with pytest.raises(FlowConfigError) as refusal:
        read(CONFIG | {field: mountain})
    assert len(str(refusal.value)) < 2000


def test_a_composite_detector_gates_each_stage_by_its_own():
    document = config(saturationDetector={"pluginRef": "both"})
    document["plugins"] = [
        {"name": "p", "type": "concurrency-detector", "parameters": {"concurrencyMode": "tokens", "maxTokenConcurrency": 9}},
        {"name": "d", "type": "utilization-detector", "parameters": {"queueDepthThreshold": 2}},
        {"name": "both", "type": "max-saturation-detector",
         "parameters": {"detectors": ["p", "d"], "stages": {"p": ["prefill"], "d": ["decode"]}}},
        {"name": "holdback", "type": "priority-holdback-policy", "parameters": {"minCeiling": 0.4}},
    ]  # fmt: skip
    flow = read(document).document["flow"]
    assert (flow["prefill"]["mode"], flow["prefill"]["token_limit_per_node"]) == ("tokens", 9)
    assert (flow["decode"]["detector"], flow["decode"]["queue_threshold"]) == ("utilization", 2)


def test_program_aware_fairness_is_least_attained_service():
    document = config(priorityBands=[{"priority": 100, "fairnessPolicyRef": "program-aware-fairness"}])
    assert bands_of(read(document))["premium"]["fairness"] == "least-attained-service"


def test_what_has_no_counterpart_is_said():
    notes = " ".join(read(config(enableEviction=True)).notes)
    for part in ("headroom", "enableEviction", "schedulingProfiles", "queue-scorer"):
        assert part in notes


def changed(path: str, value):
    document = copy.deepcopy(CONFIG)
    *parents, last = path.split("/")
    place = document
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (changed("apiVersion", "v1"), "apiVersion"),
        (changed("surprise", 1), "surprise"),
        (changed("flowControl/surprise", 1), "flowControl.surprise"),
        (changed("flowControl/maxBytes", "ten"), "flowControl.maxBytes"),
        (changed("flowControl/defaultRequestTTL", 60), "flowControl.defaultRequestTTL"),
        (changed("flowControl/priorityBands/1/colour", 1), "flowControl.priorityBands[1].colour"),
        (changed("flowControl/priorityBands/1/priority", 100), "flowControl.priorityBands[1].priority"),
        (changed("flowControl/priorityBands/0/fairnessPolicyRef", "luck"), "flowControl.priorityBands[0].fairnessPolicyRef"),
        (changed("flowControl/priorityBands/0/orderingPolicyRef", "lifo"), "flowControl.priorityBands[0].orderingPolicyRef"),
        (changed("flowControl/saturationDetector", {"pluginRef": "guess"}), "flowControl.saturationDetector.pluginRef"),
        (changed("flowControl/usageLimitPolicyPluginRef", "guess"), "flowControl.usageLimitPolicyPluginRef"),
        (changed("plugins/1/parameters", {"maxConcurrency": 0}), "plugins[1].parameters.maxConcurrency"),
        (changed("plugins/1/parameters", {"speed": 1}), "plugins[1].parameters.speed"),
        (changed("plugins/2/parameters", {}), "plugins[2].parameters.minCeiling"),
        (changed("plugins", [{"name": "nameless"}]), "plugins[0].type"),
        ({"kind": "Deployment"}, "documents[0].kind"),
        ("words", "documents[0]"),
        ({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": "x"},
          "spec": {"priority": "high"}}, "InferenceObjective/x.spec.priority"),
        ({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": "x"},
          "spec": {"poolRef": {"name": "other"}}}, "InferenceObjective/x.spec.poolRef.name"),
        ({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "spec": {}}, "InferenceObjective.metadata.name"),
    ],
)  # fmt: skip
def test_a_bad_document_says_which_field_is_wrong(document, field):
    with pytest.raises(FlowConfigError) as refusal:
        read(document)
    assert refusal.value.field == field


def test_nothing_at_all_is_no_configuration():
    with pytest.raises(FlowConfigError, match="at least one"):
        read()


VARIANTS = [
    CURRENT["flow"],
    CURRENT["flow"] | {"max_requests": None, "max_bytes": None, "default_ttl_s": None, "displacement": False},
    CURRENT["flow"] | {"ceilings": {"policy": "priority-holdback", "min_ceiling": 0.3}},
    CURRENT["flow"] | {"prefill": STAGE | {"mode": "hybrid", "limit_per_node": None, "token_limit_per_node": 9000}},
    CURRENT["flow"] | {"prefill": STAGE | {"detector": "predicted-ttft", "ttft_budget_s": 0.75},
                       "decode": STAGE | {"detector": "utilization", "queue_threshold": 2.5, "stale_after_s": 2.0}},
    CURRENT["flow"] | {"prefill": STAGE | {"detector": "off"}, "decode": STAGE | {"detector": "off"}},
    CURRENT["flow"] | {"decode": STAGE | {"mode": "tokens"}},
]  # fmt: skip


@pytest.mark.parametrize("flow", VARIANTS)
def test_what_is_written_is_read_as_the_same(flow):
    bands = copy.deepcopy(CURRENT["bands"])
    bands[0] |= {"fairness": "token-fair", "ordering": "continue-first", "ceiling": 0.8}
    bands[2] |= {"fairness": "least-attained-service", "ordering": "edf", "ttl_s": None}
    before = copy.deepcopy(CURRENT | {"bands": bands, "flow": flow})
    written = llmd.write(before, "gb300")
    assert llmd.read(written, before, "gb300").document == before


def test_what_is_written_makes_the_same_elsewhere():
    other = copy.deepcopy(CURRENT)
    other["bands"] = [{"name": "only", "priority": 5} | TEMPLATE | {"fairness": "global-strict", "ttl_s": 7.0}]
    other["objectives"] = []
    there = llmd.read(llmd.write(CURRENT, "gb300"), other, "gb300").document
    assert there["bands"] == CURRENT["bands"]
    assert there["objectives"] == CURRENT["objectives"]
    assert there["flow"] == CURRENT["flow"]
