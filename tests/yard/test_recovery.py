"""Recovery: where broken requests go on, which nodes get no more work for their faults, and what is freed on nodes."""

from __future__ import annotations

import pytest

from tests.yard.scene import Scene
from tests.yard.test_nodes import chain, stored
from workers.yard import commands, events
from workers.yard.recovery import Attempts, Breaker, OrphanWatch, is_node_fault

THREE_PREFILL = {"p1": "prefill", "p2": "prefill", "p3": "prefill", "d1": "decode", "d2": "decode"}


def fail_prefill(scene: Scene, request_id: str, reason: str, retryable: bool = True) -> None:
    scene.feed(events.PrefillFailed(request_id, retryable, reason))


def released(scene: Scene) -> list[tuple[str, str]]:
    return [(command.node, command.request_id) for command in scene.of(commands.ReleaseHandoff)]


# ---- where a request goes on


def test_a_short_output_goes_on_from_the_context_that_still_waits_at_the_prefill_node() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 30)
    lost, source = scene.decode_node("r"), scene.prefill_node("r")
    scene.feed(events.DecodeFailed("r", True, "stream-broken"))
    again = scene.of(commands.StartDecode, "r")[1]
    assert again.node != lost and again.source == source
    assert len(scene.of(commands.StartPrefill, "r")) == 1
    scene.done("r")
    assert scene.record("r")["outcome"] == "completed"
    scene.assert_nothing_is_held()


def test_an_old_context_or_a_long_output_is_computed_again_by_a_prefill_node() -> None:
    for tokens, pause_s in ((300, 0.0), (30, 26.0)):
        scene = Scene()
        scene.arrive("r", output_tokens=1000)
        scene.prefilled("r")
        scene.decoded("r", tokens)
        scene.wait(pause_s)
        scene.feed(events.DecodeFailed("r", True, "stream-broken"))
        assert scene.of(commands.StartPrefill, "r")[1].resumed_tokens == tokens + 1


def test_without_any_prefill_node_a_request_that_has_begun_goes_on_on_a_decode_node() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode", "d2": "decode"})
    scene.arrive("r", output_tokens=1000)
    scene.prefilled("r")
    scene.decoded("r", 300)
    for _ in range(2):
        scene.feed(events.NodeUnreachable("p1", refused=True))
    lost = scene.decode_node("r")
    scene.feed(events.DecodeFailed("r", True, "stream-broken"))
    assert scene.decode_node("r") != lost and len(scene.of(commands.StartPrefill, "r")) == 1
    scene.done("r")
    scene.assert_nothing_is_held()


def test_both_nodes_lost_at_once_leave_the_request_waiting_until_one_comes_back() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"}, flow=Scene().document["flow"] | {"empty_pool_ttl_s": 20})
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 5)
    for name in ("p1", "d1"):
        for _ in range(2):
            scene.feed(events.NodeUnreachable(name, refused=True))
    assert scene.yard.waiting_for_nodes == 1
    scene.report("d1", boot_id="boot-2")
    assert scene.decode_node("r") == "d1", "a decode node alone can compute what was already begun"
    scene.done("r")
    scene.assert_nothing_is_held()


def test_a_node_that_restarted_is_not_avoided_any_more() -> None:
    scene = Scene({"p1": "prefill", "p2": "prefill", "d1": "decode"})
    scene.arrive("r")
    first = scene.prefill_node("r")
    fail_prefill(scene, "r", "connection-broken")
    second = scene.prefill_node("r")
    assert second != first and scene.yard.requests["r"].avoid == {first}
    scene.report(first, boot_id="boot-2")
    assert scene.yard.requests["r"].avoid == set()


def test_failures_count_in_a_row_and_progress_forgives_them_but_not_for_ever() -> None:
    attempts = Attempts()
    assert [attempts.failed(1, "stream-broken") for _ in range(4)] == [False, False, False, True]
    attempts = Attempts()
    outcomes = [attempts.failed(20 * n, "stream-broken") for n in range(1, 14)]
    assert outcomes == [False] * 12 + [True]


def test_dead_processes_are_out_at_their_first_refusal_and_cost_the_request_no_attempt() -> None:
    phases = {"p1": "prefill"} | {f"d{n}": "decode" for n in range(1, 7)}
    scene = Scene(phases, flow=Scene().document["flow"] | {"empty_pool_ttl_s": 20})
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 5)
    scene.feed(events.DecodeFailed("r", True, "stream-broken"))
    for _ in range(20):
        if scene.yard.waiting_for_nodes:
            break
        scene.feed(events.DecodeFailed("r", True, "connection-refused"))
    assert scene.yard.fleet.nodes.split()["down"] == 6 and scene.yard.waiting_for_nodes == 1
    assert not scene.of(commands.Refuse)
    scene.report("d3", boot_id="boot-2")
    assert scene.decode_node("r") == "d3"
    scene.done("r")
    scene.assert_nothing_is_held()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_refused_by_every_node_a_request_tries_again_a_little_later_but_not_for_ever(stage: str) -> None:
    """The only node may still hold the former attempt for a moment: four quick tries would end the request for nothing."""
    scene = Scene({"p1": "prefill", "d1": "decode"})
    scene.arrive("r")
    if stage == "decode":
        scene.prefilled("r")
    kind = commands.StartPrefill if stage == "prefill" else commands.StartDecode
    failed = events.PrefillFailed if stage == "prefill" else events.DecodeFailed
    for tries in range(1, 13):
        assert len(scene.of(kind, "r")) == tries
        scene.feed(failed("r", True, "duplicate-request"))
        assert scene.yard.waiting_for_nodes == 1 and len(scene.of(kind, "r")) == tries
        scene.wait(0.4)
        for name in ("p1", "d1"):
            scene.report(name)
        assert len(scene.of(kind, "r")) == tries
        scene.wait(0.2)
    scene.feed(failed("r", True, "duplicate-request"))
    assert scene.refusal("r").code == "upstream-failed"
    scene.assert_nothing_is_held()


def test_a_broken_nodes_pool_may_still_be_read_by_the_one_that_goes_on() -> None:
    scene = Scene({"p1": "prefill", "p2": "prefill", "d1": "decode"})
    scene.feed(events.NodeSnapshotTaken("p1", 4, []))
    scene.feed(events.NodeEvents("p1", [stored(5, chain(1, 50))]))
    scene.arrive("r", blocks=50, first_id=1)
    assert scene.prefill_node("r") == "p1"
    fail_prefill(scene, "r", "connection-broken")
    again = scene.of(commands.StartPrefill, "r")[1]
    assert (again.node, again.fetch) == ("p2", commands.Fetch("p1", 0, 50))
    assert {row.node: row.why_not for row in scene.yard.requests["r"].terms}["p1"] == "avoided"


def test_a_prefill_that_failed_never_starts_a_decode() -> None:
    scene = Scene()
    scene.arrive("r")
    for _ in range(4):
        fail_prefill(scene, "r", "engine-failed")
    assert not scene.of(commands.StartDecode, "r")
    assert scene.refusal("r").http_status == 502
    scene.arrive("bad")
    fail_prefill(scene, "bad", "bad-field", retryable=False)
    assert not scene.of(commands.StartDecode)


# ---- silent and faulty nodes


def test_a_node_that_has_not_reported_lately_gets_new_work_only_when_nobody_else_can() -> None:
    scene = Scene(limit_per_node=8)
    scene.wait(3.5, silent=("p1", "d1"))
    assert scene.yard.snapshot(scene.now)["verdict"]["level"] == "degraded"
    for n in range(6):
        scene.arrive(f"r{n}")
        assert (scene.prefill_node(f"r{n}"), scene.of(commands.StartPrefill)[-1].decode_node) == ("p2", "d2")
    scene.wait(0.6, silent=("p1", "p2", "d1", "d2"))
    scene = Scene({"p1": "prefill", "d1": "decode"})
    scene.wait(3.5, silent=("p1", "d1"))
    scene.arrive("r")
    assert scene.prefill_node("r") == "p1"


def test_ten_client_errors_do_not_open_the_circuit_of_a_node() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"})
    for n in range(10):
        scene.arrive(f"r{n}")
        fail_prefill(scene, f"r{n}", "bad-field", retryable=False)
    for n in range(10, 20):
        scene.arrive(f"r{n}")
        scene.prefilled(f"r{n}")
        scene.feed(events.DecodeFailed(f"r{n}", False, "context-length"))
    assert [node.why_not(stage) for node, stage in zip(scene.yard.fleet.nodes, ("prefill", "decode"), strict=True)] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    "reason", ["wrong-phase", "draining", "stale-generation", "queue-full", "duplicate-request", "aborted"]
)
def test_refusals_say_nothing_against_a_node(reason: str) -> None:
    assert not is_node_fault(reason, retryable=True)


@pytest.mark.parametrize("reason", ["connection-broken", "stream-broken", "bad-answer", "engine-failed", "http-500"])
def test_what_breaks_on_a_node_counts_against_it(reason: str) -> None:
    assert is_node_fault(reason, retryable=True)


def test_three_faults_in_a_row_keep_work_away_and_a_trial_brings_it_back() -> None:
    scene = Scene(THREE_PREFILL, limit_per_node=8)
    broken = "p1"
    for n in range(12):
        scene.arrive(f"r{n}")
        if scene.prefill_node(f"r{n}") == broken:
            fail_prefill(scene, f"r{n}", "engine-failed")
    node = scene.yard.fleet.nodes.by_name[broken]
    assert node.why_not("prefill") == "circuit-open" and node.health == "ok"
    assert len([c for c in scene.of(commands.StartPrefill) if c.node == broken]) == 3
    assert scene.yard.outcomes.recoveries == {"engine-failed": 3}
    scene.wait(5.1)
    assert node.why_not("prefill") is None
    for n in range(12, 40):
        scene.arrive(f"r{n}")
        if scene.prefill_node(f"r{n}") == broken:
            scene.prefilled(f"r{n}")
            break
    fail_prefill(scene, "r0", "engine-failed")
    assert node.breaker.faults == 0, "the trial went well"


def test_an_open_circuit_hands_back_what_only_queues_there() -> None:
    scene = Scene({"p1": "prefill", "p2": "prefill", "d1": "decode"}, limit_per_node=8)
    for n in range(8):
        scene.arrive(f"r{n}", first_id=1)
    mine = [f"r{n}" for n in range(8) if scene.prefill_node(f"r{n}") == "p1"]
    assert len(mine) >= 4
    for name in mine[:3]:
        fail_prefill(scene, name, "engine-failed")
    assert {scene.prefill_node(name) for name in mine} == {"p2"}


def test_a_breaker_waits_twice_as_long_each_time() -> None:
    breaker, now = Breaker(), 0.0
    waits = []
    for _ in range(6):
        while not breaker.failed(now):
            pass
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.look(now)
        assert not breaker.is_open
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    breaker.succeeded()
    assert [breaker.failed(now) for _ in range(3)] == [False, False, True]


def test_an_engine_that_makes_no_iteration_counts_as_lost_until_it_moves_again() -> None:
    scene = Scene()
    scene.arrive("r")
    stuck = scene.prefill_node("r")
    scene.report(stuck, running_prefill=1, stalled_s=29.0)
    assert scene.prefill_node("r") == stuck
    scene.report(stuck, stalled_s=30.5)
    assert scene.prefill_node("r") != stuck
    snapshots = len(scene.of(commands.FetchSnapshot))
    scene.report(stuck, stalled_s=31.5)
    assert len(scene.of(commands.FetchSnapshot)) == snapshots, "its pool is read again only when it is back"
    scene.report(stuck, stalled_s=0.0)
    assert scene.yard.fleet.nodes.by_name[stuck].takes("prefill")
    assert len(scene.of(commands.FetchSnapshot)) == snapshots + 1


# ---- what nodes hold


def test_a_hand_over_is_released_once_the_decode_node_has_it() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    assert released(scene) == []
    scene.decoded("r", 1)
    scene.decoded("r", 1)
    assert released(scene) == [(scene.prefill_node("r"), "r")]
    scene.done("r")
    assert len(released(scene)) == 1


def test_a_client_that_leaves_at_the_hand_over_frees_both_nodes() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    scene.feed(events.ClientGone("r"))
    assert [(c.node, c.stage) for c in scene.of(commands.AbortOnNode)] == [(scene.decode_node("r"), "decode")]
    assert released(scene) == [(scene.prefill_node("r"), "r")]
    scene.assert_nothing_is_held()


def test_an_answer_that_ends_at_its_first_token_by_a_stop_string_leaves_no_hand_over() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r", first_finish="stop-string")
    assert released(scene) == [(scene.prefill_node("r"), "r")]
    scene.arrive("s")
    scene.prefilled("s", first_finish="length")
    assert len(released(scene)) == 1, "the node itself kept none"


def test_requests_that_a_node_lists_twice_without_need_are_dropped_there() -> None:
    scene = Scene()
    scene.arrive("r")
    node, other = scene.prefill_node("r"), "p2" if scene.prefill_node("r") == "p1" else "p1"
    scene.report(node, own_requests=frozenset({"r", "gone"}))
    scene.report(other, own_requests=frozenset({"r"}))
    assert not scene.of(commands.DropOrphan)
    scene.report(node, own_requests=frozenset({"r", "gone"}))
    scene.report(other, own_requests=frozenset({"r"}))
    assert [(c.node, c.request_id) for c in scene.of(commands.DropOrphan)] == [(node, "gone"), (other, "r")]
    known = scene.yard.fleet.nodes.by_name
    assert (known[node].orphan_requests, known[other].orphan_requests) == (1, 1)
    scene.report(node, own_requests=frozenset({"r"}))
    assert known[node].orphan_requests == 0


def test_a_request_between_two_reports_is_no_orphan() -> None:
    watch = OrphanWatch()
    assert watch.report({"a"}, ()) == frozenset()
    assert watch.report({"b"}, ()) == frozenset()
    assert watch.report({"b"}, {"b"}) == frozenset()
    assert watch.report({"b"}, ()) == frozenset()
    assert watch.report({"b"}, ()) == {"b"}
