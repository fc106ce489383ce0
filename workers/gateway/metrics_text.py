"""Prometheus' text of a gateway: what was counted, and gauges read from the yard at the scrape."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, groupby

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from apps.kvcache.domain.reuse import DIMENSIONS
from workers.gateway.counts import Counts, Histograms
from workers.gateway.metrics import PREFIX, GatewayMetrics
from workers.yard.nodes import STAGES
from workers.yard.yard import Yard


def render(metrics: GatewayMetrics, now: float, yard: Yard) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_Counted(metrics))
    registry.register(_YardGauges(now, yard))
    return generate_latest(registry)


class _Counted:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for histograms in self._metrics.histograms:
            yield as_histogram(histograms)
        for counts in self._metrics.counters:
            yield as_counter(counts)


def as_counter(counts: Counts) -> Metric:
    family = CounterMetricFamily(counts.family.name, counts.family.help, labels=counts.family.labels)
    for labels, value in counts.values.items():
        family.add_metric(labels, value)
    return family


def as_histogram(histograms: Histograms) -> Metric:
    """Buckets are told as Prometheus has them: each with all that lies below it."""
    told = histograms.family
    family = HistogramMetricFamily(told.name, told.help, labels=told.labels)
    names = [floatToGoString(bound) for bound in (*histograms.bounds, math.inf)]
    for labels, spread in histograms.spreads.items():
        below = list(zip(names, map(float, accumulate(spread.counts)), strict=True))
        family.add_metric(labels, below, spread.sum)
        if histograms.bounds[0] < 0:  # the sum may fall, so the library leaves it out, and the count with it
            family.add_sample(f"{told.name}_count", dict(zip(told.labels, labels, strict=True)), below[-1][1])
    return family


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
