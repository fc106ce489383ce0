"""What was counted reads as the library's own counters would."""

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from workers.gateway.counts import Counts, Family, Histograms
from workers.gateway.metrics import ERROR_BUCKETS, QUEUE_BUCKETS
from workers.gateway.metrics_text import as_counter, as_histogram


class Told(CollectorRegistry):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family
        self.register(self)

    def collect(self) -> list[Metric]:
        return [self._family]


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("bounds", [QUEUE_BUCKETS, ERROR_BUCKETS])
def test_a_histogram_reads_as_the_librarys(bounds: tuple[float, ...]) -> None:
    registry = CollectorRegistry()
    theirs = Histogram("lately_seconds", "Lately.", ("band",), buckets=bounds, registry=registry)
    ours = Histograms(Family("lately_seconds", "Lately.", ("band",)), bounds)
    rng = random.Random(3)
    values = [*bounds, *(bound + 1e-9 for bound in bounds), *(rng.uniform(-6, 200) for _ in range(300))]
    for value in values:
        band = rng.choice(("premium", 'quo"ted\n'))
        theirs.labels(band).observe(value)
        ours.observe((band,), value)
    told = samples(generate_latest(Told(as_histogram(ours))))
    assert told == pytest.approx(samples(generate_latest(registry)))
    assert sum(value for (name, _), value in told.items() if name.endswith("_count")) == len(values)


def test_a_counter_adds_up_under_the_name_that_counters_have() -> None:
    counts = Counts(Family("told", "Told.", ("kind",)))
    counts.add(("a",))
    counts.add(("a",), 2.5)
    assert samples(generate_latest(Told(as_counter(counts)))) == {("told_total", (("kind", "a"),)): 3.5}
