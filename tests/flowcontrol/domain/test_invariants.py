"""Thousands of random events against a plain list that does the same the slow way."""

from __future__ import annotations

import random

import pytest

from apps.flowcontrol.domain.commands import Dispatch
from apps.flowcontrol.domain.config import BandConfig, FlowConfig, StageConfig
from apps.flowcontrol.domain.controller import FlowController
from apps.flowcontrol.domain.events import Cancel, Enqueue, PoolChanged, Reconfigure, StageReleased, Tick, Withdraw
from tests.flowcontrol.domain.driving import request

PRIORITIES = (100, 0, -10)


def random_config(rng: random.Random, fairness: str, ordering: str) -> FlowConfig:
    priorities = rng.sample(PRIORITIES, 3)
    bands = (BandConfig(f"band{i}", p, fairness, ordering, max_requests=30) for i, p in enumerate(priorities))
    return FlowConfig(
        bands=tuple(bands),
        prefill=StageConfig(limit_per_node=2),
        decode=StageConfig(limit_per_node=5),
        max_requests=60,
        max_bytes=2000,
        default_ttl_s=20.0,
        empty_pool_ttl_s=5.0,
    )


class Model:
    """What must be true, kept in plain lists."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[str, str, float, float]] = {}  # name -> band, flow, enqueued, deadline
        self.prefill: set[str] = set()
        self.decode: set[str] = set()
        self.ended: set[str] = set()
        self.arrived = 0


def check_dispatch(model: Model, command: Dispatch, config: FlowConfig, one_line: bool, ordering: str) -> None:
    band, flow, enqueued, deadline = model.waiting.pop(command.request_id)
    priority = {b.name: b.priority for b in config.bands}
    rivals = [entry for entry in model.waiting.values() if priority[entry[0]] >= priority[band]]
    assert all(priority[entry[0]] == priority[band] for entry in rivals), "a higher band was waiting"
    same_line = [entry for entry in rivals if one_line or entry[1] == flow]
    position = 3 if ordering == "edf" else 2
    mine = (band, flow, enqueued, deadline)[position]
    assert all(mine <= entry[position] for entry in same_line), "not the first of its line"
    model.prefill.add(command.request_id)


@pytest.mark.parametrize("ordering", ["fcfs", "edf"])
@pytest.mark.parametrize("fairness", ["round-robin", "global-strict"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_events_keep_every_promise(seed, fairness, ordering):
    rng = random.Random(f"{seed} {fairness} {ordering}")
    config = random_config(rng, fairness, ordering)
    controller = FlowController(config)
    model, now, nodes = Model(), 0.0, {"prefill": 0, "decode": 0}
    withdrawals = seed == 3  # a withdrawn request goes first, so the order is only checked without them

    def send(event) -> None:
        for command in controller.handle(now, event):
            assert command.request_id not in model.ended
            if isinstance(command, Dispatch):
                if withdrawals:
                    model.waiting.pop(command.request_id)
                    model.prefill.add(command.request_id)
                else:
                    check_dispatch(model, command, config, fairness == "global-strict", ordering)
                assert len(model.prefill) <= 2 * nodes["prefill"]
                assert len(model.prefill) + len(model.decode) <= 5 * nodes["decode"]
            else:
                model.waiting.pop(command.request_id, None)
                model.ended.add(command.request_id)

    for step in range(3000):
        now += rng.choice([0.0, 0.0, 0.01, 0.3])
        while (deadline := controller.next_deadline()) is not None and deadline <= now:
            late, now = now, deadline
            send(Tick())
            now = late
        draw = rng.random()
        if draw < 0.5:
            name, band, flow = f"r{step}", f"band{rng.randrange(3)}", f"flow{rng.randrange(6)}"
            ttl_s = rng.choice([None, 0.5, 4.0, 100.0])
            end = now + min(20.0, ttl_s or 20.0)
            model.waiting[name] = (band, flow, now, end)
            model.arrived += 1
            starts, size = rng.random() < 0.5, rng.randrange(100)
            send(Enqueue(request(name, band, flow, bytes=size, ttl_s=ttl_s, starts_branch=starts)))
        elif draw < 0.7 and model.prefill:
            name = rng.choice(sorted(model.prefill))
            model.prefill.remove(name)
            if withdrawals and rng.random() < 0.3:
                model.waiting[name] = ("", "", 0.0, 1e9)
                send(Withdraw(name))
            else:
                model.decode.add(name)
                send(StageReleased(name, "prefill"))
        elif draw < 0.85 and model.decode:
            name = rng.choice(sorted(model.decode))
            model.decode.remove(name)
            model.ended.add(name)
            send(StageReleased(name, "decode"))
        elif draw < 0.9 and model.waiting:
            send(Cancel(rng.choice(sorted(model.waiting))))
        elif draw < 0.93:
            stage = rng.choice(["prefill", "decode"])
            busy = len(model.prefill) if stage == "prefill" else len(model.prefill) + len(model.decode)
            least = -(-busy // (2 if stage == "prefill" else 5))  # limits are promised for new dispatches only
            nodes[stage] = max(least, rng.choice([0, 1, 2, 4]))
            send(PoolChanged(stage, nodes[stage]))
        elif draw < 0.95:
            config = random_config(rng, fairness, ordering)
            send(Reconfigure(config))
        controller.check_integrity()
        totals = controller.totals
        assert totals.arrived == model.arrived
        assert totals.waiting == len(model.waiting)
        assert all(end >= now for _, _, _, end in model.waiting.values()), "somebody waits beyond the end"
    gone = totals.rejected + totals.expired + totals.displaced + totals.cancelled
    assert totals.arrived == totals.dispatched + gone + totals.waiting
    assert min(totals.dispatched, totals.rejected, totals.expired, totals.displaced, totals.cancelled) > 0
