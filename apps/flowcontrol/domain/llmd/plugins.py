"""The `plugins` of an EndpointPickerConfig, as far as its `flowControl` part refers to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from apps.flowcontrol.domain.fields import Fields, FlowConfigError
from apps.flowcontrol.domain.llmd import names
from apps.flowcontrol.domain.llmd.quantities import duration_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Ceilings from `highest` for the highest priority to `lowest` for the lowest: in equal steps, or by the distance of the
    priorities' values."""

    by_value: bool
    lowest: float
    highest: float

    def over(self, priorities: Iterable[int]) -> dict[int, float]:
        order = sorted(set(priorities), reverse=True)
        if len(order) < 2:
            return dict.fromkeys(order, self.highest)
        places = [self._place(order, rank) for rank in range(len(order))]
        return {
            priority: round(self.highest - place * (self.highest - self.lowest), 9)
            for priority, place in zip(order, places, strict=True)
        }

    def _place(self, order: list[int], rank: int) -> float:
        """From 0 for the first to 1 for the last."""
        if self.by_value:
            return (order[0] - order[rank]) / (order[0] - order[-1])
        return rank / (len(order) - 1)


class Plugins:
    """Finds a referred plugin's type and parameters. A plugin that is not declared may be referred to by its type."""

    def __init__(self, root: Fields, notes: list[str]) -> None:
        self._declared: dict[str, tuple[str, Fields]] = {}
        self._notes = notes
        self._used: set[str] = set()
        for plugin in root.items("plugins"):
            kind = plugin.text("type", None)
            parameters = plugin.section("parameters")
            self._declared[plugin.text("name", kind)] = (kind, parameters)
            plugin.refuse_others()

    @property
    def unused(self) -> list[str]:
        return sorted(set(self._declared) - self._used)

    def find(self, path: str, ref: str) -> tuple[str, Fields]:
        self._used.add(ref)
        return self._declared.get(ref, (ref, Fields({}, f"plugins[{ref}].parameters")))

    def policy(self, path: str, ref: str, known: Mapping[str, str]) -> str:
        """Our name of a fairness or ordering policy. Raises FlowConfigError for one we do not have."""
        kind, parameters = self.find(path, ref)
        if kind not in known:
            raise FlowConfigError(path, "one of " + ", ".join(known), ref)
        if kind == "program-aware-fairness":
            parameters.choice("strategy", "las", ("las",))
            tuned = sorted(str(name) for name in parameters.raw if name != "strategy")
            if tuned:
                self._notes.append(f"{parameters.path}: {', '.join(tuned)} have no counterpart here and are not used")
        else:
            parameters.refuse_others()
        return known[kind]

    def ceilings(self, path: str, ref: str) -> dict[str, Any]:
        """`flow.ceilings`, and under `by_priority`, `for_all` or `spread` what each band's own ceiling shall be."""
        kind, parameters = self.find(path, ref)
        if kind == names.STATIC_LIMIT:
            threshold = parameters.number("threshold", 1.0, low=0.0, high=1.0)
            parameters.refuse_others()
            return {"policy": "static", "for_all": threshold}
        if kind != names.HOLDBACK:
            raise FlowConfigError(path, f"one of {names.STATIC_LIMIT}, {names.HOLDBACK}", ref)
        domain = parameters.choice("domain", "rank", ("rank", "value", "explicit"))
        if domain == "explicit":
            table = parameters.section("ceilings")
            parameters.refuse_others()
            return {"policy": "static", "by_priority": {_priority(table, key): _ratio(table, key) for key in table.raw}}
        parameters.choice("shape", "linear", ("linear",))
        if parameters.raw.get("minCeiling") is None:
            raise FlowConfigError(parameters.at("minCeiling"), "a number from 0 to 1", None)
        lowest = parameters.number("minCeiling", 0.5, low=0.0, high=1.0)
        highest = parameters.number("maxCeiling", 1.0, low=0.0, high=1.0)
        if highest < lowest:
            raise FlowConfigError(parameters.at("maxCeiling"), f"a number from minCeiling ({lowest:g}) to 1", highest)
        parameters.refuse_others()
        if domain == "rank" and highest == 1.0:
            return {"policy": "priority-holdback", "min_ceiling": lowest, "for_all": 1.0}
        self._notes.append(f"{parameters.path}: kept as a fixed ceiling of each band, by the bands there are now")
        return {"policy": "static", "for_all": highest, "spread": Spread(domain == "value", lowest, highest)}

    def stages(self, path: str, ref: str) -> dict[str, dict[str, Any]]:
        """Settings of `prefill` and `decode`. One detector gates both; a composite may give each stage its own."""
        kind, parameters = self.find(path, ref)
        if kind != names.COMPOSITE:
            settings = self._detector(path, ref)
            return {"prefill": settings, "decode": dict(settings)}
        children = _texts(parameters, "detectors")
        scopes = parameters.section("stages")
        by_stage: dict[str, list[str]] = {"prefill": [], "decode": []}
        for child in children:
            allowed = _texts(scopes, child) if child in scopes.raw else ["prefill", "decode"]
            for stage in allowed:
                if stage not in by_stage:
                    raise FlowConfigError(scopes.at(child), "a list of prefill and decode", stage)
                by_stage[stage].append(child)
        parameters.refuse_others()
        found = {}
        for stage, refs in by_stage.items():
            if len(refs) > 1:
                raise FlowConfigError(parameters.path, f"at most one detector for {stage}", refs)
            found[stage] = self._detector(parameters.at("detectors"), refs[0]) if refs else {"detector": "off"}
        return found

    def _detector(self, path: str, ref: str) -> dict[str, Any]:
        kind, parameters = self.find(path, ref)
        if kind == names.CONCURRENCY:
            settings = self._concurrency(parameters)
        elif kind == names.UTILIZATION:
            staleness = parameters.at("metricsStalenessThreshold")
            given = parameters.get("metricsStalenessThreshold")
            settings = {
                "detector": "utilization",
                "queue_threshold": parameters.number(
                    "queueDepthThreshold", names.DEFAULT_QUEUE_DEPTH, low=0, above=True
                ),
                "kv_threshold": parameters.number(
                    "kvCacheUtilThreshold", names.DEFAULT_KV_UTILIZATION, 0, 1, above=True
                ),
                "stale_after_s": duration_s(staleness, names.DEFAULT_STALENESS if given is None else given),
            }
            if settings["stale_after_s"] < 1.0:
                self._notes.append(f"{staleness}: nodes report once a second here, so it is kept as 2 s")
                settings["stale_after_s"] = 2.0
        elif kind == names.PREDICTED_TTFT:
            budget_s = duration_s(parameters.at("ttftBudget"), parameters.get("ttftBudget"))
            settings = {"detector": "predicted-ttft", "ttft_budget_s": budget_s}
        elif kind == names.OFF:
            settings = {"detector": "off"}
        else:
            raise FlowConfigError(path, "one of " + ", ".join(names.DETECTORS), ref)
        if parameters.number("headroom", 0.0, low=0.0):
            self._notes.append(f"{parameters.at('headroom')}: placement here takes no headroom; the gate is the limit")
        if kind == names.CONCURRENCY:
            parameters.get("inFlightLoadProducerName")
            parameters.get("failOpen")
        parameters.refuse_others()
        return settings

    @staticmethod
    def _concurrency(parameters: Fields) -> dict[str, Any]:
        mode = parameters.choice("concurrencyMode", "requests", ("requests", "tokens", "hybrid"))
        requests, tokens = parameters.limit("maxConcurrency"), parameters.limit("maxTokenConcurrency")
        settings: dict[str, Any] = {"detector": "concurrency", "mode": mode}
        if mode != "tokens":
            settings["limit_per_node"] = names.DEFAULT_CONCURRENCY if requests is None else requests
        if mode != "requests":
            settings["token_limit_per_node"] = names.DEFAULT_TOKEN_CONCURRENCY if tokens is None else tokens
        return settings


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise FlowConfigError(fields.at(name), "a list of names", value)
    return value


def _priority(table: Fields, key: object) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    try:
        return int(str(key))
    except ValueError:
        raise FlowConfigError(table.at(str(key)), "a priority (a whole number) as key", key) from None


def _ratio(table: Fields, key: Any) -> float:
    return table.number(key, 1.0, low=0.0, high=1.0)
