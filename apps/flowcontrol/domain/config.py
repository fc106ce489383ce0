"""What an operator edits: bands, limits and stage gates. Parsed from the configuration document, errors name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

FAIRNESS_POLICIES = ("round-robin", "global-strict")
ORDERING_POLICIES = ("fcfs", "edf")
DETECTORS = ("concurrency", "off")
DETECTOR_MODES = ("requests",)
DEFAULT_BAND_NAME = "default"
DEFAULT_EMPTY_POOL_TTL_S = 30.0


class FlowConfigError(ValueError):
    """A configuration that cannot be used: `field` is its path in the document, `expected` what belongs there."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got!r}")
        self.field = field
        self.expected = expected


@dataclass(frozen=True, slots=True)
class BandConfig:
    """One priority band. `None` limits mean no limit; `ttl_s` None means the global default.

    `ceiling`: the band is dispatched only while each stage's saturation is below it. `min_share`: the share of
    dispatches it is guaranteed while it waits, whatever waits above it; 0 keeps the strict order.
    """

    name: str
    priority: int
    fairness: str = "round-robin"
    ordering: str = "fcfs"
    max_requests: int | None = None
    max_bytes: int | None = None
    ttl_s: float | None = None
    ceiling: float = 1.0
    min_share: float = 0.0

    @property
    def sheddable(self) -> bool:
        """Negative priorities give way to higher ones when a global limit is full."""
        return self.priority < 0


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The gate of one stage: `limit_per_node` requests on each healthy node; None (`auto`) takes what engines report."""

    detector: str = "concurrency"
    mode: str = "requests"
    limit_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """Flow control of one partition. Limits of None mean no limit; a TTL of None means waiting has no end."""

    bands: tuple[BandConfig, ...] = ()
    default_band: BandConfig = BandConfig(name=DEFAULT_BAND_NAME, priority=0)
    prefill: StageConfig = StageConfig()
    decode: StageConfig = StageConfig()
    max_requests: int | None = None
    max_bytes: int | None = None
    default_ttl_s: float | None = None
    empty_pool_ttl_s: float = DEFAULT_EMPTY_POOL_TTL_S
    displacement: bool = True

    def band_for(self, name: str, priority: int | None) -> BandConfig:
        """The configured band of this name, else one of its own made from the default template."""
        for band in self.bands:
            if band.name == name:
                return band
        return replace(
            self.default_band, name=name, priority=self.default_band.priority if priority is None else priority
        )

    @staticmethod
    def parse(document: Mapping[str, Any]) -> FlowConfig:
        """Read `bands`, `default_band` and `flow` of a configuration document; raises `FlowConfigError`."""
        raw_bands = document.get("bands", [])
        if not isinstance(raw_bands, list):
            raise FlowConfigError("bands", "a list of bands", raw_bands)
        bands = tuple(_band(_Fields(raw, f"bands[{index}]"), None) for index, raw in enumerate(raw_bands))
        _refuse_repeats(bands)
        default = BandConfig(name=DEFAULT_BAND_NAME, priority=0)
        if document.get("default_band") is not None:
            default = _band(_Fields(document["default_band"], "default_band"), default)
        flow = _Fields(document.get("flow") or {}, "flow")
        config = FlowConfig(
            bands=bands,
            default_band=default,
            prefill=_stage(_Fields(flow.raw.get("prefill") or {}, "flow.prefill")),
            decode=_stage(_Fields(flow.raw.get("decode") or {}, "flow.decode")),
            max_requests=flow.limit("max_requests"),
            max_bytes=flow.limit("max_bytes"),
            default_ttl_s=flow.seconds("default_ttl_s"),
            empty_pool_ttl_s=flow.number("empty_pool_ttl_s", DEFAULT_EMPTY_POOL_TTL_S, low=0.0),
            displacement=flow.flag("displacement", True),
        )
        flow.refuse_others("prefill", "decode")
        return config


@dataclass(slots=True)
class _Fields:
    """Typed access to one object of the document; remembers what was read so that unknown fields can be named."""

    raw: Any
    path: str
    seen: set[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise FlowConfigError(self.path, "an object", self.raw)
        self.seen = set()

    def _get(self, name: str) -> Any:
        assert self.seen is not None
        self.seen.add(name)
        return self.raw.get(name)

    def text(self, name: str, default: str | None) -> str:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise FlowConfigError(f"{self.path}.{name}", "a non-empty text", value)
        return value

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self._get(name)
        if value is None:
            return default
        if value not in allowed:
            raise FlowConfigError(f"{self.path}.{name}", "one of " + ", ".join(allowed), value)
        return str(value)

    def integer(self, name: str, default: int | None) -> int:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise FlowConfigError(f"{self.path}.{name}", "a whole number", value)
        return value

    def limit(self, name: str) -> int | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FlowConfigError(f"{self.path}.{name}", "a whole number from 1, or null for no limit", value)
        return value

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            upto = "" if high == math.inf else f" to {high:g}"
            raise FlowConfigError(f"{self.path}.{name}", f"a number from {low:g}{upto}", value)
        return float(value)

    def seconds(self, name: str) -> float | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise FlowConfigError(f"{self.path}.{name}", "seconds above 0, or null for the default", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FlowConfigError(f"{self.path}.{name}", "true or false", value)
        return value

    def refuse_others(self, *also_known: str) -> None:
        assert self.seen is not None
        for name in self.raw:
            if name not in self.seen and name not in also_known:
                known = ", ".join(sorted(self.seen.union(also_known)))
                raise FlowConfigError(f"{self.path}.{name}", f"no such field (known: {known})", self.raw[name])


def _band(fields: _Fields, template: BandConfig | None) -> BandConfig:
    band = BandConfig(
        name=fields.text("name", template.name if template else None),
        priority=fields.integer("priority", template.priority if template else None),
        fairness=fields.choice("fairness", "round-robin", FAIRNESS_POLICIES),
        ordering=fields.choice("ordering", "fcfs", ORDERING_POLICIES),
        max_requests=fields.limit("max_requests"),
        max_bytes=fields.limit("max_bytes"),
        ttl_s=fields.seconds("ttl_s"),
        ceiling=fields.number("ceiling", 1.0, low=0.0, high=1.0),
        min_share=fields.number("min_share", 0.0, low=0.0, high=0.9),
    )
    fields.refuse_others()
    return band


def _stage(fields: _Fields) -> StageConfig:
    limit = fields.raw.get("limit_per_node")
    stage = StageConfig(
        detector=fields.choice("detector", "concurrency", DETECTORS),
        mode=fields.choice("mode", "requests", DETECTOR_MODES),
        limit_per_node=None if limit == "auto" else fields.limit("limit_per_node"),
    )
    fields.refuse_others("limit_per_node")
    return stage


def _refuse_repeats(bands: tuple[BandConfig, ...]) -> None:
    names: set[str] = set()
    priorities: set[int] = set()
    for index, band in enumerate(bands):
        if band.name in names:
            raise FlowConfigError(f"bands[{index}].name", "a name no other band has", band.name)
        if band.priority in priorities:
            raise FlowConfigError(f"bands[{index}].priority", "a priority no other band has", band.priority)
        names.add(band.name)
        priorities.add(band.priority)
    if sum(band.min_share for band in bands) > 0.9:
        raise FlowConfigError("bands", "min_share of all bands together at most 0.9", [b.min_share for b in bands])
