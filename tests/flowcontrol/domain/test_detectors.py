"""Is there room: limits in tokens, engines' own reports, predictions, and ceilings below them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apps.flowcontrol.domain.config import BandConfig, CeilingConfig, StageConfig
from apps.flowcontrol.domain.events import NodeReport, PoolChanged, PredictedTtft, Reconfigure, StageReleased
from tests.flowcontrol.domain.driving import Cluster, flow_config, names

OFF = StageConfig(detector="off")


def gated(
    prefill: StageConfig = OFF, decode: StageConfig = OFF, nodes: tuple[str, ...] = ("n1",), bands=None
) -> Cluster:
    """A cluster with these gates whose nodes have names; requests run until they are released."""
    config = replace(flow_config(bands=bands), prefill=prefill, decode=decode)
    cluster = Cluster(config, answer_s=None, nodes=0)
    for stage in ("prefill", "decode"):
        cluster.send(PoolChanged(stage, len(nodes), nodes=nodes))
    return cluster


def stage(cluster: Cluster, name: str):
    return cluster.controller.snapshot(cluster.now).stages[name]


# --- concurrency in tokens ---


def test_prompt_tokens_in_prefill_never_exceed_the_token_limit():
    cluster = gated(StageConfig(mode="tokens", token_limit_per_node=1000))
    cluster.enqueue(*names("r", 5), uncached_tokens=400)
    assert cluster.order == ["r0", "r1"], "a third would make 1200"
    assert stage(cluster, "prefill").tokens == 800
    cluster.send(StageReleased("r0", "prefill"))
    assert cluster.order == ["r0", "r1", "r2"]


def test_a_request_larger_than_the_limit_runs_alone():
    cluster = gated(StageConfig(mode="tokens", token_limit_per_node=1000))
    cluster.enqueue("small", uncached_tokens=10)
    cluster.enqueue("huge", uncached_tokens=5000)
    cluster.enqueue("after", uncached_tokens=10)
    assert cluster.order == ["small"], "what comes later does not pass a large one for ever"
    cluster.send(StageReleased("small", "prefill"))
    assert cluster.order == ["small", "huge"]
    cluster.send(StageReleased("huge", "prefill"))
    assert cluster.order == ["small", "huge", "after"]


def test_decode_counts_the_kv_a_request_will_hold_and_what_prefills_announce():
    cluster = gated(decode=StageConfig(mode="tokens", token_limit_per_node=1000))
    cluster.enqueue(*names("r", 3), prompt_tokens=300, uncached_tokens=10, output_tokens=100)
    assert cluster.order == ["r0", "r1"]
    assert (stage(cluster, "decode").announced, stage(cluster, "decode").tokens) == (2, 800)
    cluster.send(StageReleased("r0", "prefill"))
    assert stage(cluster, "decode").tokens == 800, "announced or running, it takes up the same"
    cluster.send(StageReleased("r0", "decode"))
    assert cluster.order == ["r0", "r1", "r2"]


def test_in_hybrid_mode_the_scarcer_of_requests_and_tokens_decides():
    cluster = gated(StageConfig(mode="hybrid", limit_per_node=2, token_limit_per_node=1000))
    cluster.enqueue(*names("small", 3), uncached_tokens=10)
    assert len(cluster.order) == 2
    for name in names("small", 3):
        cluster.release(name)
    cluster.enqueue("big0", "big1", uncached_tokens=600)
    assert cluster.order[-1] == "big0"
    assert stage(cluster, "prefill").limit == 2 and stage(cluster, "prefill").token_limit == 1000


def test_an_automatic_token_limit_follows_what_engines_report():
    cluster = gated(StageConfig(mode="tokens"))
    cluster.enqueue(*names("r", 4), uncached_tokens=400)
    assert len(cluster.order) == 1, "one a node until the engines have said what they take"
    cluster.send(PoolChanged("prefill", 1, reported_tokens=1200, nodes=("n1",)))
    assert len(cluster.order) == 3
    cluster.send(PoolChanged("prefill", 1, reported_tokens=2000, nodes=("n1",)))
    assert len(cluster.order) == 4


# --- utilization ---

UTILIZATION = StageConfig(detector="utilization", queue_threshold=4, kv_threshold=0.8, stale_after_s=3.0)


def report(
    cluster: Cluster, node: str, queue: int = 0, kv: float = 0.0, running: int = 0, at: float | None = None
) -> None:
    cluster.send(NodeReport(node, "prefill", queue, kv, cluster.now if at is None else at, running))


def test_a_queue_or_a_full_kv_closes_the_gate():
    cluster = gated(UTILIZATION)
    report(cluster, "n1", queue=4)
    cluster.enqueue("a")
    assert cluster.order == []
    report(cluster, "n1", kv=0.8)
    assert cluster.order == []
    report(cluster, "n1", queue=1, kv=0.4)
    assert cluster.order == ["a"]


def test_what_was_dispatched_since_the_report_counts_as_waiting():
    cluster = gated(UTILIZATION)
    report(cluster, "n1")
    cluster.enqueue(*names("r", 10), flow="many")
    assert len(cluster.order) == 4, "a burst does not pass a gate that still looks open"
    report(cluster, "n1", queue=0, running=4)
    assert len(cluster.order) == 8


def test_a_node_without_a_fresh_report_counts_as_full_and_the_others_go_on():
    cluster = gated(UTILIZATION, nodes=("n1", "n2"))
    cluster.enqueue("first")
    assert cluster.order == [], "nobody has reported yet"
    report(cluster, "n1")
    assert cluster.order == ["first"]
    cluster.now = 10.0
    report(cluster, "n2", at=5.0)
    assert cluster.controller.saturation(10.0, "prefill") >= 1.0, "both words are old"
    report(cluster, "n1", running=1)
    assert cluster.controller.saturation(10.0, "prefill") == 0.5


def test_a_new_gate_knows_what_was_reported_before():
    cluster = gated()
    report(cluster, "n1", queue=4)
    cluster.send(Reconfigure(replace(cluster.controller.config, prefill=UTILIZATION)))
    assert cluster.controller.saturation(0.0, "prefill") == 1.0


# --- predicted-ttft ---

BANDS = (
    BandConfig("premium", 100, ttft_budget_s=2.0),
    BandConfig("standard", 0),
    BandConfig("batch", -10, ttft_budget_s=60.0),
)
PREDICTED = StageConfig(detector="predicted-ttft", ttft_budget_s=5.0)


def test_each_prediction_lets_one_request_through():
    cluster = gated(PREDICTED)
    cluster.send(PredictedTtft(0.1))
    cluster.enqueue(*names("r", 5))
    assert cluster.order == ["r0"]
    cluster.send(PredictedTtft(0.2))
    assert cluster.order == ["r0", "r1"]
    cluster.send(PredictedTtft(5.0))
    assert cluster.order == ["r0", "r1"], "over the budget"


def test_each_band_has_a_budget_of_its_own():
    cluster = gated(PREDICTED, bands=BANDS)
    cluster.enqueue("running")
    cluster.enqueue("p", band="premium")
    cluster.enqueue("s", band="standard")
    cluster.enqueue("b", band="batch")
    cluster.send(PredictedTtft(3.0))
    assert cluster.order == ["running", "s"], "three seconds are too long for premium, which waits for a better moment"
    cluster.send(PredictedTtft(10.0))
    assert cluster.order == ["running", "s", "b"]
    cluster.send(PredictedTtft(1.0))
    assert cluster.order[-1] == "p"


def test_an_idle_stage_takes_one_request_whatever_is_predicted():
    cluster = gated(PREDICTED)
    cluster.send(PredictedTtft(100.0))
    cluster.enqueue("a", "b")
    assert cluster.order == ["a"]
    cluster.release("a")
    assert cluster.order == ["a", "b"]


def test_predictions_are_wanted_only_while_somebody_waits_for_them():
    cluster = gated(PREDICTED)
    assert not cluster.controller.wants_predictions
    cluster.enqueue("a", "b")
    assert cluster.controller.wants_predictions
    cluster.send(Reconfigure(flow_config(limit=1)))
    assert not cluster.controller.wants_predictions


# --- ceilings ---


@pytest.mark.parametrize(("rank", "ceiling"), [(0, 1.0), (1, 0.8), (2, 0.6)])
def test_priority_holdback_lowers_ceilings_by_rank(rank, ceiling):
    config = replace(flow_config(limit=10), ceilings=CeilingConfig("priority-holdback", 0.6))
    band = Cluster(config, answer_s=None).controller.snapshot(0.0).bands[rank]
    assert band.ceiling == pytest.approx(ceiling)


def test_a_held_back_band_leaves_room_for_higher_ones():
    config = replace(flow_config(limit=10), ceilings=CeilingConfig("priority-holdback", 0.6))
    cluster = Cluster(config, answer_s=None)
    cluster.enqueue(*names("low", 12), band="best-effort")
    assert len(cluster.order) == 6
    assert "below 60% only" in cluster.controller.snapshot(0.0).bands[2].waits_for
    cluster.enqueue(*names("mid", 12), band="standard")
    assert len(cluster.order) == 8
    cluster.enqueue(*names("high", 12), band="premium")
    assert len(cluster.order) == 10


def test_a_bands_own_ceiling_counts_when_it_is_lower():
    bands = [BandConfig("high", 1), BandConfig("low", 0, ceiling=0.3)]
    config = replace(flow_config(limit=10, bands=bands), ceilings=CeilingConfig("priority-holdback", 0.8))
    low = Cluster(config, answer_s=None).controller.snapshot(0.0).bands[1]
    assert low.ceiling == 0.3


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        (StageConfig(limit_per_node=1), "prefill is full (1/1)"),
        (StageConfig(mode="tokens", token_limit_per_node=5), "prefill is full (10/5 tokens)"),
        (PREDICTED, "prefill is full (1 requests, predicted TTFT unknown)"),
    ],
)
def test_a_band_says_what_it_waits_for(prefill, words):
    cluster = gated(prefill)
    cluster.enqueue("a", "b", uncached_tokens=10)
    waits = {band.name: band.waits_for for band in cluster.controller.snapshot(0.0).bands}
    assert waits == {"premium": None, "standard": words, "best-effort": None}
