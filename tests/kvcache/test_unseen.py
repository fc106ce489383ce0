"""The machine knows of which nodes it does not know what they hold."""

from __future__ import annotations

from apps.kvcache.domain import events as ev
from tests.kvcache.kit import World


def test_a_node_is_unseen_until_its_first_event_or_snapshot() -> None:
    w = World()
    assert w.machine.unseen(w.now, ["p1", "p2"]) == {"p1": "no-events", "p2": "no-events"}
    w.store("p1", [1, 2])
    w.send(ev.NodeSnapshot("p2", 40, []))
    assert w.machine.unseen(w.now, ["p1", "p2"]) == {}


def test_a_gap_in_its_events_makes_a_node_unseen_until_the_snapshot() -> None:
    w = World()
    w.store("p1", [1, 2])
    w.next_seq("p1")
    w.store("p1", [1, 2, 3])
    assert w.machine.unseen(w.now, ["p1"]) == {"p1": "snapshot-awaited-gap"}
    w.send(ev.NodeSnapshot("p1", 3, []))
    assert w.machine.unseen(w.now, ["p1"]) == {}


def test_a_heartbeat_that_stops_makes_a_node_unseen() -> None:
    w = World()
    w.send(ev.NodeSequence("p1", w.next_seq("p1")))
    assert w.machine.unseen(w.now + 4.0, ["p1"]) == {}
    assert w.machine.unseen(w.now + 6.0, ["p1"]) == {"p1": "events-silent"}
    w.send(ev.NodeSequence("p1", w.next_seq("p1")), after_s=10.0)
    assert w.machine.unseen(w.now, ["p1"]) == {}


def test_a_lost_node_is_unseen_again() -> None:
    w = World()
    w.store("p1", [1])
    w.send(ev.NodeLost("p1"))
    assert w.machine.unseen(w.now, ["p1"]) == {"p1": "no-events"}
