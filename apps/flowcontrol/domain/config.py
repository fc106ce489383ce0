"""What an operator edits: bands, limits and stage gates. Parsed from the configuration document, errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from apps.flowcontrol.domain.fields import Fields, FlowConfigError

__all__ = ["BandConfig", "CeilingConfig", "FlowConfig", "FlowConfigError", "StageConfig"]

FAIRNESS_POLICIES = ("round-robin", "global-strict", "token-fair", "least-attained-service")
ORDERING_POLICIES = ("fcfs", "edf", "slo-deadline", "continue-first")
DETECTORS = ("concurrency", "utilization", "predicted-ttft", "off")
DETECTOR_MODES = ("requests", "tokens", "hybrid")
CEILING_POLICIES = ("static", "priority-holdback")
DEFAULT_BAND_NAME = "default"
DEFAULT_EMPTY_POOL_TTL_S = 30.0
MOST_SHARED = 0.9


@dataclass(frozen=True, slots=True)
class BandConfig:
    """One priority band. `None` limits mean no limit; `ttl_s` None means the global default.

    `ceiling`: the band is dispatched only while each stage's saturation is below it. `min_share`: the share of
    dispatches it is guaranteed while it waits, whatever waits above it; 0 keeps the strict order. `ttft_budget_s`: what
    the `predicted-ttft` detector may let this band's first token take; None takes the stage's.
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
    ttft_budget_s: float | None = None

    @property
    def sheddable(self) -> bool:
        """Negative priorities give way to higher ones when a global limit is full."""
        return self.priority < 0


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The gate of one stage; the detector says which fields count.

    `concurrency`: at most `limit_per_node` requests and/or `token_limit_per_node` tokens on each healthy node, by
    `mode`; None (`auto`) follows what the engines report. `utilization`: a node is full at `queue_threshold` waiting
    requests or a KV usage of `kv_threshold`, and as soon as its last report is older than `stale_after_s`.
    `predicted-ttft`: full when the best node's predicted TTFT is above the band's budget, else above `ttft_budget_s`.
    """

    detector: str = "concurrency"
    mode: str = "requests"
    limit_per_node: int | None = None
    token_limit_per_node: int | None = None
    queue_threshold: float = 5.0
    kv_threshold: float = 0.8
    stale_after_s: float = 3.0
    ttft_budget_s: float = 5.0


@dataclass(frozen=True, slots=True)
class CeilingConfig:
    """`static` takes each band's own ceiling; `priority-holdback` also lowers them with the band's rank, linearly from
    1.0 for the highest band to `min_ceiling` for the lowest."""

    policy: str = "static"
    min_ceiling: float = 0.5

    def of_rank(self, rank: int, bands: int) -> float:
        """The ceiling of the band of this rank (0 is the highest) among `bands`."""
        if self.policy == "static" or bands < 2:
            return 1.0
        return 1.0 - (1.0 - self.min_ceiling) * rank / (bands - 1)


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
    ceilings: CeilingConfig = CeilingConfig()

    @property
    def gated_by_prediction(self) -> bool:
        """Some stage wants to hear of predicted TTFTs."""
        return "predicted-ttft" in (self.prefill.detector, self.decode.detector)

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
        bands = tuple(_band(Fields(raw, f"bands[{index}]"), None) for index, raw in enumerate(raw_bands))
        _refuse_repeats(bands)
        default = BandConfig(name=DEFAULT_BAND_NAME, priority=0)
        if document.get("default_band") is not None:
            default = _band(Fields(document["default_band"], "default_band"), default)
        flow = Fields(document.get("flow") or {}, "flow")
        config = FlowConfig(
            bands=bands,
            default_band=default,
            prefill=_stage(flow.section("prefill")),
            decode=_stage(flow.section("decode")),
            max_requests=flow.limit("max_requests"),
            max_bytes=flow.limit("max_bytes"),
            default_ttl_s=flow.seconds("default_ttl_s"),
            empty_pool_ttl_s=flow.number("empty_pool_ttl_s", DEFAULT_EMPTY_POOL_TTL_S, low=0.0),
            displacement=flow.flag("displacement", True),
            ceilings=_ceilings(flow.section("ceilings")),
        )
        flow.refuse_others()
        return config


def _band(fields: Fields, template: BandConfig | None) -> BandConfig:
    band = BandConfig(
        name=fields.text("name", template.name if template else None),
        priority=fields.integer("priority", template.priority if template else None),
        fairness=fields.choice("fairness", "round-robin", FAIRNESS_POLICIES),
        ordering=fields.choice("ordering", "fcfs", ORDERING_POLICIES),
        max_requests=fields.limit("max_requests"),
        max_bytes=fields.limit("max_bytes"),
        ttl_s=fields.seconds("ttl_s"),
        ceiling=fields.number("ceiling", 1.0, low=0.0, high=1.0),
        min_share=fields.number("min_share", 0.0, low=0.0, high=MOST_SHARED),
        ttft_budget_s=fields.seconds("ttft_budget_s"),
    )
    fields.refuse_others()
    return band


def _stage(fields: Fields) -> StageConfig:
    default = StageConfig()
    stage = StageConfig(
        detector=fields.choice("detector", default.detector, DETECTORS),
        mode=fields.choice("mode", default.mode, DETECTOR_MODES),
        limit_per_node=fields.limit("limit_per_node", auto=True),
        token_limit_per_node=fields.limit("token_limit_per_node", auto=True),
        queue_threshold=fields.number("queue_threshold", default.queue_threshold, low=0.0, above=True),
        kv_threshold=fields.number("kv_threshold", default.kv_threshold, low=0.0, high=1.0, above=True),
        stale_after_s=fields.number("stale_after_s", default.stale_after_s, low=0.0, above=True),
        ttft_budget_s=fields.number("ttft_budget_s", default.ttft_budget_s, low=0.0, above=True),
    )
    fields.refuse_others()
    return stage


def _ceilings(fields: Fields) -> CeilingConfig:
    default = CeilingConfig()
    ceilings = CeilingConfig(
        policy=fields.choice("policy", default.policy, CEILING_POLICIES),
        min_ceiling=fields.number("min_ceiling", default.min_ceiling, low=0.0, high=1.0),
    )
    fields.refuse_others()
    return ceilings


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
    if sum(band.min_share for band in bands) > MOST_SHARED + 1e-9:
        raise FlowConfigError("bands", "min_share of all bands together at most 0.9", [b.min_share for b in bands])
