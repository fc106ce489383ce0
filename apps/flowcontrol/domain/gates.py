"""The gates of both stages: what each holds, how full it is, and whether a band or a request may pass.

A dispatch takes a prefill place and announces a decode place in the same step.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from apps.flowcontrol.domain.bands import Band
from apps.flowcontrol.domain.config import FlowConfig, StageConfig
from apps.flowcontrol.domain.events import STAGES, NodeReport, PoolChanged, PredictedTtft, Stage
from apps.flowcontrol.domain.saturation import SaturationDetector, StageLoad, make_detector
from apps.flowcontrol.domain.snapshot import StageSnapshot
from apps.flowcontrol.domain.waiting import Place, Waiting


class Gates:
    """Loads and detectors of prefill and decode. Every request that was dispatched is counted until `free`."""

    def __init__(self) -> None:
        self.loads: dict[Stage, StageLoad] = {stage: StageLoad(stage) for stage in STAGES}
        self._prefill, self._decode = self.loads["prefill"], self.loads["decode"]
        self._detectors: dict[Stage, SaturationDetector] = {}
        self._settings: dict[Stage, StageConfig] = {}
        self._observations: dict[tuple[str, str], NodeReport | PredictedTtft] = {}

    def configure(self, config: FlowConfig) -> None:
        """A stage's detector stays when its settings do; a new one is told what was observed so far."""
        wanted: dict[Stage, StageConfig] = {"prefill": config.prefill, "decode": config.decode}
        for stage, settings in wanted.items():
            if self._settings.get(stage) == settings:
                continue
            detector = self._detectors[stage] = make_detector(settings)
            for (of_stage, _), seen in self._observations.items():
                if of_stage in ("", stage):
                    detector.observe(seen)
        self._settings = wanted
        gates = [(self._detectors[stage], self.loads[stage]) for stage in STAGES]
        self._shared = [gate for gate in gates if not gate[0].per_band]
        self._by_band = [gate for gate in gates if gate[0].per_band]
        self._by_request = [gate for gate in gates if gate[0].per_request]

    # --- what is heard -------------------------------------------------------------------------------------------

    def pool_changed(self, event: PoolChanged) -> None:
        load = self.loads[event.stage]
        load.healthy_nodes = event.healthy_nodes
        load.nodes = event.nodes
        load.reported_limit = event.reported_limit
        load.reported_tokens = event.reported_tokens

    def observe(self, event: NodeReport | PredictedTtft) -> None:
        if isinstance(event, NodeReport):
            self._observations[event.stage, event.node] = event
            self._detectors[event.stage].observe(event)
            return
        self._observations["", ""] = event
        for detector in self._detectors.values():
            detector.observe(event)

    @property
    def empty(self) -> bool:
        """A stage has no node at all."""
        return self._prefill.healthy_nodes <= 0 or self._decode.healthy_nodes <= 0

    @property
    def wants_predictions(self) -> bool:
        return bool(self._by_band)

    # --- places --------------------------------------------------------------------------------------------------

    def take(self, waiting: Waiting) -> None:
        """A place in prefill, and one in decode that is announced."""
        waiting.place = Place.PREFILL
        prefill, decode = self._prefill, self._decode
        prefill.running += 1
        prefill.tokens += waiting.request.uncached_tokens
        decode.announced += 1
        decode.tokens += waiting.context_tokens
        for detector in self._detectors.values():
            detector.dispatched()

    def finish_prefill(self, waiting: Waiting) -> None:
        """The announced decode place becomes a running one."""
        self._leave_prefill(waiting)
        self._decode.running += 1
        waiting.place = Place.DECODE

    def free(self, waiting: Waiting) -> None:
        """Gives back every place a dispatched request holds."""
        if waiting.place is Place.PREFILL:
            self._leave_prefill(waiting)
        elif waiting.place is Place.DECODE:
            self._decode.running -= 1
        self._decode.tokens -= waiting.context_tokens

    def _leave_prefill(self, waiting: Waiting) -> None:
        self._prefill.running -= 1
        self._prefill.tokens -= waiting.request.uncached_tokens
        self._decode.announced -= 1

    # --- who may pass --------------------------------------------------------------------------------------------

    def saturation(self, now: float, stage: Stage) -> float:
        return self._detectors[stage].saturation(now, self.loads[stage])

    def shared_saturation(self, now: float) -> float:
        """The fuller stage's saturation, as far as it is the same for all bands."""
        saturation = 0.0
        for detector, load in self._shared:
            stage_saturation = detector.saturation(now, load)
            if stage_saturation > saturation:
                saturation = stage_saturation
        return saturation

    def may_go(self, now: float, band: Band, shared_saturation: float) -> bool:
        """Whether the saturation that counts for a band is below its ceiling."""
        saturation = shared_saturation
        for detector, load in self._by_band:
            saturation = max(saturation, detector.saturation(now, load, band.config))
        return saturation < band.ceiling

    def next_fits(self, band: Band) -> bool:
        """Whether the band's next request fits into what room is left."""
        if not self._by_request:
            return True
        waiting = band.peek()
        return all(detector.fits(load, waiting) for detector, load in self._by_request)

    # --- what people read ----------------------------------------------------------------------------------------

    def describe(self) -> str:
        """How full both stages are, in a few words."""
        told = [f"{stage} {self._detectors[stage].describe(self.loads[stage])}" for stage in STAGES]
        return ", ".join(told) + " taken"

    def why_closed(self, now: float, band: Band) -> str | None:
        """Why the next request of a band that waits may not pass; None if it may."""
        for stage, load in self.loads.items():
            detector = self._detectors[stage]
            saturation = detector.saturation(now, load, band.config)
            if saturation == inf:
                return f"{stage} has no healthy node"
            if saturation >= 1.0 or not detector.fits(load, band.peek()):
                return f"{stage} is full ({detector.describe(load)})"
            if saturation >= band.ceiling:
                return f"{stage} is at {saturation:.0%}, and this band goes below {band.ceiling:.0%} only"
        return None

    def fullest_if_full(self, now: float) -> Stage | None:
        fullest = max(STAGES, key=lambda stage: self.saturation(now, stage))
        return fullest if self.saturation(now, fullest) >= 1.0 else None

    def snapshot(self, now: float) -> dict[Stage, StageSnapshot]:
        return {
            stage: StageSnapshot(
                saturation=self.saturation(now, stage),
                in_flight=load.running,
                announced=load.announced,
                limit=self._detectors[stage].limit(load),
                tokens=load.tokens,
                token_limit=self._detectors[stage].token_limit(load),
            )
            for stage, load in self.loads.items()
        }

    def check_integrity(self, requests: Collection[Waiting]) -> None:
        """Raises `AssertionError` when the loads are not exactly what the dispatched ones of `requests` hold."""
        in_prefill = [w for w in requests if w.place is Place.PREFILL]
        in_decode = [w for w in requests if w.place is Place.DECODE]
        assert len(in_prefill) == self._prefill.running == self._decode.announced, "prefill places differ"
        assert len(in_decode) == self._decode.running, "decode places differ"
        assert sum(w.request.uncached_tokens for w in in_prefill) == self._prefill.tokens, "prefill tokens differ"
        assert sum(w.context_tokens for w in in_prefill + in_decode) == self._decode.tokens, "decode tokens differ"
