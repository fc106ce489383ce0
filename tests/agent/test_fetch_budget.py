"""What may be in flight from one peer at a time."""

from __future__ import annotations

import asyncio

import pytest

from workers.agent.engines.reference.fetcher import BlockBudget


async def hold(budget: BlockBudget, blocks: int, log: list[str], name: str, until: asyncio.Event) -> None:
    async with budget.taken(blocks):
        log.append(f"{name} begins")
        await until.wait()
    log.append(f"{name} ends")


async def test_fetches_wait_for_room_and_take_turns() -> None:
    budget = BlockBudget(10)
    log: list[str] = []
    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [
        asyncio.create_task(hold(budget, 6, log, "a", first)),
        asyncio.create_task(hold(budget, 6, log, "b", rest)),
        asyncio.create_task(hold(budget, 1, log, "c", rest)),
    ]
    await asyncio.sleep(0)
    assert log == ["a begins"], "c would fit, but must not overtake b"
    first.set()
    await asyncio.sleep(0.01)
    assert log == ["a begins", "a ends", "b begins", "c begins"]
    rest.set()
    await asyncio.gather(*tasks)
    assert budget._free == 10


@pytest.mark.parametrize("moment", ["waiting", "let in"])
async def test_a_cancelled_fetch_takes_no_room(moment: str) -> None:
    budget = BlockBudget(4)
    log: list[str] = []
    until = asyncio.Event()
    first = asyncio.create_task(hold(budget, 4, log, "a", until))
    await asyncio.sleep(0)
    second = asyncio.create_task(hold(budget, 3, log, "b", asyncio.Event()))
    third = asyncio.create_task(hold(budget, 1, log, "c", until))
    await asyncio.sleep(0)
    if moment == "let in":
        until.set()
        await first
    second.cancel()
    until.set()
    await asyncio.gather(first, third)
    assert log[-1] == "c ends"
    assert budget._free == 4
