"""Prometheus metrics, named as llm-d's flow control names them, and a few of our own under `switchyard_`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from apps.flowcontrol.domain.commands import Outcome
from apps.kvcache.domain.reuse import DIMENSIONS
from workers.yard.commands import StartPrefill
from workers.yard.nodes import STAGES
from workers.yard.yard import Yard

PREFIX = "llm_d_epp_flow_control_"
MAX_FAIRNESS_IDS = 1000
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)
CYCLE_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
ERROR_BUCKETS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


Labelled = TypeVar("Labelled", Counter, Histogram)


class GatewayMetrics:
    """Counts what passes; gauges are read from the yard when somebody scrapes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._fairness_ids: set[str] = set()
        self._children: dict[tuple[int, tuple[str, ...]], Any] = {}
        labels = ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name")
        self._queue_s = Histogram(
            PREFIX + "request_queue_duration_seconds",
            "Time from arrival to the end of waiting.",
            labels,
            buckets=QUEUE_BUCKETS,
            registry=self._registry,
        )
        self._enqueue_s = Histogram(
            PREFIX + "request_enqueue_duration_seconds",
            "Time to take one request into the queue.",
            ("inference_pool",),
            buckets=CYCLE_BUCKETS,
            registry=self._registry,
        )
        self._cycle_s = Histogram(
            PREFIX + "dispatch_cycle_duration_seconds",
            "Time to take one event and dispatch all there is room for, placement included.",
            ("inference_pool",),
            buckets=CYCLE_BUCKETS,
            registry=self._registry,
        )
        self._requests = Counter(
            PREFIX + "requests",
            "Requests by how they left the queue.",
            ("outcome", "priority", "inference_pool"),
            registry=self._registry,
        )
        self._ttft_s = Histogram(
            "switchyard_ttft_seconds",
            "Time to first token.",
            ("band",),
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )
        self._ended = Counter(
            "switchyard_requests_ended", "Requests by their end.", ("outcome", "band"), registry=self._registry
        )
        self._tokens = Counter(
            "switchyard_tokens", "Tokens by kind: computed, cached, output.", ("kind",), registry=self._registry
        )

        self._ttft_error_s = Histogram(
            "switchyard_ttft_prediction_error_seconds",
            "Actual less predicted TTFT, by prefill node.",
            ("node",),
            buckets=ERROR_BUCKETS,
            registry=self._registry,
        )
        self._blind = Counter(
            "switchyard_router_blind_decisions",
            "Placements made without a part of the view, by what was missing.",
            ("cause",),
            registry=self._registry,
        )

    def enqueued(self, yard: Yard, seconds: float) -> None:
        self._of(self._enqueue_s, yard.config.partition).observe(seconds)

    def cycled(self, yard: Yard, seconds: float) -> None:
        """One event that dispatched something."""
        self._of(self._cycle_s, yard.config.partition).observe(seconds)

    def _of(self, metric: Labelled, *labels: str) -> Labelled:
        """The metric's child with these labels: looked up once, as this is on the path of every request."""
        key = (id(metric), labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def dispatched(self, yard: Yard, command: StartPrefill) -> None:
        if command.attempt == 1:
            request = yard.requests[command.request_id].request
            self._left_queue(yard, request.flow_id, request.band, Outcome.DISPATCHED, command.queue_s)

    def recorded(self, yard: Yard, record: dict[str, Any]) -> None:
        """Takes note of a request's telemetry record; other kinds are not counted here."""
        if record["kind"] != "request":
            return
        self._of(self._ended, record["outcome"], record["band"]).inc()
        self._of(self._tokens, "output").inc(record["output_tokens"])
        if record["computed_tokens"] is not None:
            self._of(self._tokens, "computed").inc(record["computed_tokens"])
            self._of(self._tokens, "cached").inc(record["cached_tokens"])
        if record["ttft_s"] is not None:
            self._of(self._ttft_s, record["band"]).observe(record["ttft_s"])
            if record["predicted_ttft_s"] is not None:
                error_s = record["ttft_s"] - record["predicted_ttft_s"]
                self._of(self._ttft_error_s, record["prefill_node"]).observe(error_s)
        for cause in record["router_blind"]:
            self._of(self._blind, cause).inc()
        outcome = record["flow_outcome"]
        if outcome is not None and record["prefill_node"] is None:
            waited_s = record["e2e_s"] if record["queue_s"] is None else record["queue_s"]
            self._left_queue(yard, record["flow_id"], record["band"], Outcome(outcome), waited_s)

    def _left_queue(self, yard: Yard, flow_id: str, band: str, outcome: Outcome, seconds: float) -> None:
        pool, model = yard.config.partition, yard.config.model.name
        priority = str(yard.flow.band_config(band).priority)
        if flow_id not in self._fairness_ids:
            if len(self._fairness_ids) >= MAX_FAIRNESS_IDS:
                flow_id = "other"
            else:
                self._fairness_ids.add(flow_id)
        self._of(self._requests, outcome.value, priority, pool).inc()
        self._of(self._queue_s, flow_id, priority, outcome.value, pool, model, model).observe(seconds)

    def render(self, now: float, yard: Yard) -> bytes:
        """The text of `/metrics`."""
        gauges = CollectorRegistry()
        gauges.register(_YardGauges(now, yard))
        return generate_latest(self._registry) + generate_latest(gauges)


class _YardGauges:
    def __init__(self, now: float, yard: Yard) -> None:
        self._now = now
        self._yard = yard

    def collect(self) -> Iterable[Metric]:
        flow, config = self._yard.flow.snapshot(self._now), self._yard.config
        pool = config.partition
        by_band = ["priority", "inference_pool"]
        size = GaugeMetricFamily(PREFIX + "queue_size", "Requests waiting.", labels=by_band)
        size_bytes = GaugeMetricFamily(PREFIX + "queue_bytes", "Bytes waiting.", labels=by_band)
        used = GaugeMetricFamily(PREFIX + "capacity_utilization_requests", "Share of a band's places.", labels=by_band)
        used_bytes = GaugeMetricFamily(
            PREFIX + "capacity_utilization_bytes", "Share of a band's bytes.", labels=by_band
        )
        for priority, bands in groupby(flow.bands, lambda band: band.priority):
            # What is left of a removed band may have the priority of another: one row a priority, or no scrape is valid.
            alike = list(bands)
            limits = [self._yard.flow.band_config(band.name) for band in alike]
            labels = [str(priority), pool]
            waiting, waiting_bytes = sum(band.waiting for band in alike), sum(band.waiting_bytes for band in alike)
            size.add_metric(labels, waiting)
            size_bytes.add_metric(labels, waiting_bytes)
            used.add_metric(labels, _share(waiting, _sum(limit.max_requests for limit in limits)))
            used_bytes.add_metric(labels, _share(waiting_bytes, _sum(limit.max_bytes for limit in limits)))
        yield from (size, size_bytes, used, used_bytes)
        total = GaugeMetricFamily(
            PREFIX + "global_capacity_utilization_requests", "Share of all places.", labels=["inference_pool"]
        )
        total.add_metric([pool], _share(flow.totals.waiting, config.flow.max_requests))
        total_bytes = GaugeMetricFamily(
            PREFIX + "global_capacity_utilization_bytes", "Share of all bytes.", labels=["inference_pool"]
        )
        total_bytes.add_metric([pool], _share(flow.totals.waiting_bytes, config.flow.max_bytes))
        yield from (total, total_bytes)
        saturation = GaugeMetricFamily(
            PREFIX + "pool_saturation",
            "Used share of a stage; +Inf without a node.",
            labels=["inference_pool", "stage"],
        )
        nodes = GaugeMetricFamily("switchyard_nodes_taking", "Nodes that take new work.", labels=["stage"])
        for stage in STAGES:
            saturation.add_metric([pool, stage], flow.stages[stage].saturation)
            nodes.add_metric([stage], len(self._yard.fleet.nodes.taking(stage)))
        yield from (saturation, nodes)
        yield from self._reuse()

    def _reuse(self) -> Iterable[Metric]:
        """Reuse and its losses; the sum over `cause` is `ideal` - `actual` for every `by` and `name`."""
        tokens = CounterMetricFamily(
            "switchyard_reuse_tokens", "Prompt tokens: all, reusable at best, reused.", labels=["by", "name", "kind"]
        )
        lost = CounterMetricFamily(
            "switchyard_reuse_lost_tokens", "Reusable tokens computed again.", labels=["by", "name", "cause"]
        )
        kv = self._yard.kv
        rows = [("all", "", kv.reuse())]
        rows += [(by, name, totals) for by in DIMENSIONS for name, totals in kv.reuse_by(by).items()]
        for by, name, totals in rows:
            tokens.add_metric([by, name, "prompt"], totals.prompt_tokens)
            tokens.add_metric([by, name, "ideal"], totals.ideal_tokens)
            tokens.add_metric([by, name, "actual"], totals.actual_tokens)
            for cause, count in totals.lost.items():
                lost.add_metric([by, name, cause], count)
        yield from (tokens, lost)
        yield from self._recovery()

    def _recovery(self) -> Iterable[Metric]:
        orphans = GaugeMetricFamily(
            "switchyard_orphans", "Requests that a node holds and nobody wants.", labels=["node"]
        )
        circuit = GaugeMetricFamily(
            "switchyard_circuit_open", "1 while a node gets no work for its faults.", labels=["node"]
        )
        for node in self._yard.fleet.nodes:
            orphans.add_metric([node.name], node.orphan_requests)
            circuit.add_metric([node.name], node.breaker.is_open)
        recoveries = CounterMetricFamily(
            "switchyard_recoveries", "Broken attempts that were followed by another.", labels=["reason"]
        )
        for reason, count in sorted(self._yard.outcomes.recoveries.items()):
            recoveries.add_metric([reason], count)
        yield from (orphans, circuit, recoveries)


def _sum(limits: Iterable[int | None]) -> int | None:
    """All limits together; None when one of them is none."""
    known = list(limits)
    return None if None in known else sum(limit for limit in known if limit is not None)


def _share(used: int, limit: int | None) -> float:
    return 0.0 if limit is None else used / limit if limit else math.inf
