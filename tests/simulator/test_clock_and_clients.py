"""Virtual time, and harnesses that play scripts in it."""

from __future__ import annotations

from random import Random
from typing import Any

from apps.kvcache.domain.events import BranchSignal
from workers.simulator.clients import Clients, Player, Turn
from workers.simulator.clock import ARRIVAL, COMPLETION, TIMEOUT, Clock


def test_work_that_ends_comes_before_a_deadline_of_the_same_moment() -> None:
    clock, seen = Clock(), []
    clock.at(1.0, TIMEOUT, lambda now, thing: seen.append(thing), "deadline")
    clock.at(1.0, ARRIVAL, lambda now, thing: seen.append(thing), "request")
    clock.at(1.0, COMPLETION, lambda now, thing: seen.append(thing), "end")
    clock.at(0.5, TIMEOUT, lambda now, thing: seen.append(thing), "earlier")
    clock.run_until(1.0)
    assert seen == ["earlier", "end", "request", "deadline"]
    assert clock.now == 1.0


def test_nothing_happens_before_its_time_or_in_the_past() -> None:
    clock, seen = Clock(), []

    def look_back(now: float, _: Any) -> None:
        clock.at(now - 5, ARRIVAL, lambda at, _thing: seen.append(at))

    clock.at(2.0000004, COMPLETION, look_back)
    clock.run_until(2.0)
    assert not seen
    clock.run_until(3.0)
    assert seen and seen[0] >= 2.0000004


def test_a_handler_never_sees_a_time_before_the_one_it_was_promised() -> None:
    clock, early = Clock(), []
    rng = Random(1)
    moments = [rng.random() * 1e4 for _ in range(5000)]
    for moment in moments:
        clock.at(moment, TIMEOUT, lambda now, promised: early.append(promised) if now < promised else None, moment)
    clock.run_until(2e4)
    assert early == []


def one_turn(name: str, helpers: tuple[Any, ...] = (), pause_s: float = 1.0) -> Turn:
    return Turn(pause_s, b"", 10, 1, BranchSignal(name), helpers=helpers)


def test_a_parent_asks_after_all_its_sub_agents_have_ended_and_its_pause() -> None:
    clock = Clock()
    asked: list[tuple[float, str]] = []

    def ask(now: float, player: Player) -> None:
        assert player.turn is not None
        asked.append((now, player.turn.signal.branch_id or ""))
        clock.at(
            now + (10.0 if "slow" in asked[-1][1] else 2.0), COMPLETION, lambda at, _: clients.answered(at, player)
        )

    clients = Clients(clock, ask)
    helpers = (iter([one_turn("quick")]), iter([one_turn("slow"), one_turn("slow")]))
    clients.start(0.0, iter([one_turn("parent", helpers, 3.0)]), "w", "t", "o", lambda _now, _player: None)
    assert clients.living == 3
    clock.run_until(100.0)
    assert asked == [(1.0, "quick"), (1.0, "slow"), (12.0, "slow"), (25.0, "parent")]
    assert clients.living == 0
