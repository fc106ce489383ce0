"""From our document to llm-d's: one EndpointPickerConfig, one InferenceObjective each, and what those cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.flowcontrol.domain.llmd import names
from apps.flowcontrol.domain.llmd.quantities import as_duration, as_quantity


def write(document: Mapping[str, Any], pool: str) -> list[dict[str, Any]]:
    """The documents of a partition's flow control. `reading.read` of them changes nothing."""
    flow, bands = document["flow"], document["bands"]
    plugins: dict[str, dict[str, Any]] = {}
    for band in [*bands, document["default_band"]]:
        for policy in (
            names.type_of(band["fairness"], names.FAIRNESS),
            names.type_of(band["ordering"], names.ORDERING),
        ):
            plugins[policy] = {"type": policy}
    detector = _add_detectors(flow, plugins)
    section: dict[str, Any] = {}
    for theirs, ours in (("maxBytes", "max_bytes"), ("maxRequests", "max_requests")):
        if flow[ours] is not None:
            section[theirs] = as_quantity(flow[ours])
    section["defaultRequestTTL"] = as_duration(flow["default_ttl_s"] or 0.0)
    section["noEndpointRequestTTL"] = as_duration(flow["empty_pool_ttl_s"])
    section["saturationDetector"] = {"pluginRef": detector}
    section["usageLimitPolicyPluginRef"] = _add_ceilings(document, plugins)
    section["defaultPriorityBand"] = _band(document["default_band"])
    section["priorityBands"] = [{"priority": band["priority"]} | _band(band) for band in bands]
    config = {
        "apiVersion": names.API_VERSIONS[0],
        "kind": "EndpointPickerConfig",
        "featureGates": ["flowControl"],
        "plugins": list(plugins.values()),
        "flowControl": section,
    }
    return [config, _own(document, pool), *_objectives(document, pool)]


def unknown_to_llmd(documents: list[dict[str, Any]]) -> list[str]:
    """Plugin types in these documents that only Switchyard has."""
    plugins = [plugin["type"] for document in documents for plugin in document.get("plugins", [])]
    return sorted(set(plugins) & set(names.OURS_ALONE))


def _band(band: Mapping[str, Any]) -> dict[str, Any]:
    limits = (("maxBytes", band["max_bytes"]), ("maxRequests", band["max_requests"]))
    return {name: as_quantity(limit) for name, limit in limits if limit is not None} | {
        "fairnessPolicyRef": names.type_of(band["fairness"], names.FAIRNESS),
        "orderingPolicyRef": names.type_of(band["ordering"], names.ORDERING),
    }


def _add_detectors(flow: Mapping[str, Any], plugins: dict[str, dict[str, Any]]) -> str:
    """One detector a stage, under a composite; answers the composite's name."""
    scoped: dict[str, list[str]] = {}
    for stage in ("prefill", "decode"):
        if flow[stage]["detector"] == "off":
            continue
        name = f"{stage}-saturation"
        plugins[name] = {"name": name} | _detector(flow[stage])
        scoped[name] = [stage]
    if not scoped:
        plugins[names.OFF] = {"type": names.OFF}
        return names.OFF
    parameters = {"detectors": list(scoped), "stages": scoped}
    plugins["saturation"] = {"name": "saturation", "type": names.COMPOSITE, "parameters": parameters}
    return "saturation"


def _detector(stage: Mapping[str, Any]) -> dict[str, Any]:
    if stage["detector"] == "utilization":
        parameters: dict[str, Any] = {
            "queueDepthThreshold": _plain(stage["queue_threshold"]),
            "kvCacheUtilThreshold": stage["kv_threshold"],
            "metricsStalenessThreshold": as_duration(stage["stale_after_s"]),
        }
        return {"type": names.UTILIZATION, "parameters": parameters}
    if stage["detector"] == "predicted-ttft":
        return {"type": names.PREDICTED_TTFT, "parameters": {"ttftBudget": as_duration(stage["ttft_budget_s"])}}
    parameters = {"concurrencyMode": stage["mode"]}
    if stage["mode"] != "tokens" and stage["limit_per_node"] is not None:
        parameters["maxConcurrency"] = stage["limit_per_node"]
    if stage["mode"] != "requests" and stage["token_limit_per_node"] is not None:
        parameters["maxTokenConcurrency"] = stage["token_limit_per_node"]
    return {"type": names.CONCURRENCY, "parameters": parameters}


def _add_ceilings(document: Mapping[str, Any], plugins: dict[str, dict[str, Any]]) -> str:
    ceilings = document["flow"]["ceilings"]
    if ceilings["policy"] == "priority-holdback":
        parameters: dict[str, Any] = {"domain": "rank", "minCeiling": ceilings["min_ceiling"]}
        plugins[names.HOLDBACK] = {"type": names.HOLDBACK, "parameters": parameters}
        return names.HOLDBACK
    by_priority = {band["priority"]: band["ceiling"] for band in document["bands"]}
    if all(ceiling == 1.0 for ceiling in by_priority.values()):
        plugins[names.STATIC_LIMIT] = {"type": names.STATIC_LIMIT}
        return names.STATIC_LIMIT
    parameters = {"domain": "explicit", "ceilings": by_priority}
    plugins[names.HOLDBACK] = {"type": names.HOLDBACK, "parameters": parameters}
    return names.HOLDBACK


def _own(document: Mapping[str, Any], pool: str) -> dict[str, Any]:
    flow = document["flow"]
    bands = [{"priority": b["priority"], "name": b["name"]} | _own_settings(b) for b in document["bands"]]
    automatic = {
        stage: {
            "requests": flow[stage]["limit_per_node"] is None,
            "tokens": flow[stage]["token_limit_per_node"] is None,
        }
        for stage in ("prefill", "decode")
    }
    spec = {
        "displacement": flow["displacement"],
        "bands": bands,
        "defaultBand": _own_settings(document["default_band"]),
        "automaticLimits": automatic,
    }
    return {"apiVersion": names.OWN_VERSION, "kind": names.OWN_KIND, "metadata": {"name": pool}, "spec": spec}


def _own_settings(band: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"minShare": band["min_share"], "ceiling": band["ceiling"]}
    for theirs, ours in (("ttl", "ttl_s"), ("ttftBudget", "ttft_budget_s")):
        if band.get(ours) is not None:
            settings[theirs] = as_duration(band[ours])
    return settings


def _objectives(document: Mapping[str, Any], pool: str) -> list[dict[str, Any]]:
    priority_of = {band["name"]: band["priority"] for band in document["bands"]}
    found = []
    for objective in document["objectives"]:
        wishes = ((names.SLO_ANNOTATION, objective["slo_ttft_s"]), (names.TTL_ANNOTATION, objective["ttl_s"]))
        annotations = {name: as_duration(seconds) for name, seconds in wishes if seconds is not None}
        reference = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
        found.append(
            {
                "apiVersion": names.OBJECTIVE_VERSIONS[0],
                "kind": "InferenceObjective",
                "metadata": {"name": objective["name"]} | ({"annotations": annotations} if annotations else {}),
                "spec": {"priority": priority_of[objective["band"]], "poolRef": reference},
            }
        )
    return found


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
