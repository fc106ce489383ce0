"""What is counted as requests pass, named as llm-d's flow control names it, and a few of our own under `switchyard_`."""

from __future__ import annotations

from typing import Any

from apps.flowcontrol.domain.commands import Outcome
from workers.gateway.counts import Counts, Family, Histograms
from workers.yard.commands import StartPrefill
from workers.yard.yard import Yard

PREFIX = "llm_d_epp_flow_control_"
MAX_FAIRNESS_IDS = 1000
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
CYCLE_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
ERROR_BUCKETS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """Counts what passes. `metrics_text.render` shows it, with gauges read from the yard."""

    def __init__(self) -> None:
        self._fairness_ids: set[str] = set()
        self._queue_s = Histograms(
            Family(
                PREFIX + "request_queue_duration_seconds",
                "Time from arrival to the end of waiting.",
                ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name"),
            ),
            QUEUE_BUCKETS,
        )
        self._enqueue_s = Histograms(
            Family(
                PREFIX + "request_enqueue_duration_seconds",
                "Time to take one request into the queue.",
                ("inference_pool",),
            ),
            CYCLE_BUCKETS,
        )
        self._cycle_s = Histograms(
            Family(
                PREFIX + "dispatch_cycle_duration_seconds",
                "Time to take one event and dispatch all there is room for, placement included.",
                ("inference_pool",),
            ),
            CYCLE_BUCKETS,
        )
        self._requests = Counts(
            Family(
                PREFIX + "requests", "Requests by how they left the queue.", ("outcome", "priority", "inference_pool")
            )
        )
        self._ttft_s = Histograms(Family("switchyard_ttft_seconds", "Time to first token.", ("band",)), SECONDS_BUCKETS)
        self._ended = Counts(Family("switchyard_requests_ended", "Requests by their end.", ("outcome", "band")))
        self._tokens = Counts(Family("switchyard_tokens", "Tokens by kind: computed, cached, output.", ("kind",)))
        self._ttft_error_s = Histograms(
            Family(
                "switchyard_ttft_prediction_error_seconds", "Actual less predicted TTFT, by prefill node.", ("node",)
            ),
            ERROR_BUCKETS,
        )
        self._blind = Counts(
            Family(
                "switchyard_router_blind_decisions",
                "Placements made without a part of the view, by what was missing.",
                ("cause",),
            )
        )

    @property
    def histograms(self) -> list[Histograms]:
        return [self._queue_s, self._enqueue_s, self._cycle_s, self._ttft_s, self._ttft_error_s]

    @property
    def counters(self) -> list[Counts]:
        return [self._requests, self._ended, self._tokens, self._blind]

    def enqueued(self, yard: Yard, seconds: float) -> None:
        self._enqueue_s.observe((yard.config.partition,), seconds)

    def cycled(self, yard: Yard, seconds: float) -> None:
        """One event that dispatched something."""
        self._cycle_s.observe((yard.config.partition,), seconds)

    def dispatched(self, yard: Yard, command: StartPrefill) -> None:
        if command.attempt == 1:
            request = yard.requests[command.request_id].request
            self._left_queue(yard, request.flow_id, request.band, Outcome.DISPATCHED, command.queue_s)

    def recorded(self, yard: Yard, record: dict[str, Any]) -> None:
        """Takes note of a request's telemetry record; other kinds are not counted here."""
        if record["kind"] != "request":
            return
        band: str = record["band"]
        self._ended.add((record["outcome"], band))
        self._tokens.add(("output",), float(record["output_tokens"]))
        if record["computed_tokens"] is not None:
            self._tokens.add(("computed",), float(record["computed_tokens"]))
            self._tokens.add(("cached",), float(record["cached_tokens"]))
        ttft_s: float | None = record["ttft_s"]
        if ttft_s is not None:
            self._ttft_s.observe((band,), ttft_s)
            predicted_s: float | None = record["predicted_ttft_s"]
            if predicted_s is not None:
                self._ttft_error_s.observe((record["prefill_node"],), ttft_s - predicted_s)
        for cause in record["router_blind"]:
            self._blind.add((cause,))
        outcome = record["flow_outcome"]
        if outcome is not None and record["prefill_node"] is None:
            waited_s: float = record["e2e_s"] if record["queue_s"] is None else record["queue_s"]
            self._left_queue(yard, record["flow_id"], band, Outcome(outcome), waited_s)

    def _left_queue(self, yard: Yard, flow_id: str, band: str, outcome: Outcome, seconds: float) -> None:
        pool, model = yard.config.partition, yard.config.model.name
        priority = str(yard.flow.band_config(band).priority)
        if flow_id not in self._fairness_ids:
            if len(self._fairness_ids) >= MAX_FAIRNESS_IDS:
                flow_id = "other"
            else:
                self._fairness_ids.add(flow_id)
        told: str = outcome.value
        self._requests.add((told, priority, pool))
        self._queue_s.observe((flow_id, priority, told, pool, model, model), seconds)
