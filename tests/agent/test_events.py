"""The event log: numbers, replay, gaps, heartbeats."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from workers.agent.events import EventLog


async def take(log: EventLog, seq: int | None, count: int, heartbeat_s: float = 60.0) -> list[dict[str, Any]]:
    events = []
    async for event in log.follow(seq, heartbeat_s):
        events.append(event)
        if len(events) == count:
            break
    return events


def log_of(count: int, capacity: int = 100) -> tuple[EventLog, int]:
    log = EventLog(lambda: 1000.0, capacity)
    first = log.last_seq + 1
    for index in range(count):
        log.append("test", index=index)
    return log, first


async def test_replay_starts_with_the_number_asked_for() -> None:
    log, first = log_of(5)
    events = await take(log, first + 2, 3)
    assert [event["seq"] for event in events] == [first + 2, first + 3, first + 4]
    assert [event["index"] for event in events] == [2, 3, 4]


async def test_events_forgotten_are_a_gap_and_the_stream_goes_on() -> None:
    log, first = log_of(10, capacity=4)
    following = asyncio.create_task(take(log, first, 2))
    await asyncio.sleep(0.01)
    log.bind(asyncio.get_running_loop())
    log.append("test", index=10)
    gap, after = await following
    assert (gap["type"], gap["oldest"]) == ("gap", first + 6)
    assert after["index"] == 10


async def test_a_number_from_before_a_restart_is_a_gap() -> None:
    old = EventLog(lambda: 1000.0)
    seen = [old.append("test") for _ in range(50)][-1]
    new = EventLog(lambda: 1001.0)
    new.append("test")
    (gap,) = await take(new, seen + 1, 1)
    assert gap["type"] == "gap"
    assert new.last_seq > seen


async def test_a_number_from_the_future_is_a_gap() -> None:
    log, first = log_of(1)
    (gap,) = await take(log, first + 5, 1)
    assert gap["type"] == "gap"


async def test_without_a_number_only_new_events_come_also_from_other_threads() -> None:
    log, _ = log_of(3)
    log.bind(asyncio.get_running_loop())
    following = asyncio.create_task(take(log, None, 1))
    await asyncio.sleep(0.01)
    threading.Thread(target=lambda: log.append("test", index="new")).start()
    (event,) = await asyncio.wait_for(following, 5)
    assert event["index"] == "new"


async def test_heartbeats_repeat_the_newest_number_and_take_none() -> None:
    log, first = log_of(1)
    events = await take(log, first, 3, heartbeat_s=0.01)
    assert [event["type"] for event in events] == ["test", "heartbeat", "heartbeat"]
    assert {event["seq"] for event in events} == {first}
