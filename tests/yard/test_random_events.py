"""Thousands of random events in any order: the machines never disagree, and at the end nothing is held."""

from __future__ import annotations

import random
from array import array
from base64 import b64encode
from typing import Any

import pytest

from apps.kvcache.domain.hashing import extend_chain, root_hash
from tests.yard.scene import Scene
from workers.yard import commands, events
from workers.yard.requests import Stage

ROOT = root_hash("glm", "fp8", "acme")


class Chaos:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scene = Scene(limit_per_node=2, decode_limit=3)
        self.names = list(self.scene.statuses)
        self.seqs = dict.fromkeys(self.names, 0)
        self.count = 0

    def step(self) -> None:
        actions = [self.arrive] * 4 + [self.progress] * 8 + [self.fail, self.leave, self.report, self.lose, self.store]
        self.random.choice([*actions, self.edit, self.time])()

    def arrive(self) -> None:
        self.count += 1
        band = self.random.choice(["premium", "standard"])
        branch = self.random.choice([None, "acme/a", "acme/b"])
        first_id = self.random.choice([1, 5000, 9000])
        blocks = self.random.randint(1, 60)
        self.scene.arrive(f"r{self.count}", band, blocks, 20, first_id, branch, ttl_s=self.random.choice([None, 2.0]))

    def progress(self) -> None:
        living = list(self.scene.yard.requests.values())
        if not living:
            return
        state = self.random.choice(living)
        if state.stage is Stage.PREFILLING:
            self.scene.feed(events.FirstToken(state.request_id))
            self.scene.prefilled(state.request_id, self.random.choice([None, None, None, "stop"]))
        elif self.random.random() < 0.5:
            self.scene.decoded(state.request_id, 2)
        else:
            self.scene.done(state.request_id, state.sent_tokens + 1)

    def fail(self) -> None:
        for request_id in self._one():
            reason = self.random.choice(["unreachable", "draining", "connection-broken"])
            kinds: list[Any] = [events.PrefillFailed, events.DecodeFailed]
            self.scene.feed(self.random.choice(kinds)(request_id, self.random.random() < 0.8, reason))

    def leave(self) -> None:
        for request_id in self._one():
            ends: list[events.Event] = [events.ClientGone(request_id), events.AnswerEnded(request_id, 9)]
            self.scene.feed(self.random.choice(ends))

    def report(self) -> None:
        name = self.random.choice(self.names)
        phase = self.random.choice(["prefill", "decode", "mixed", self.scene.statuses[name].phase])
        state = self.random.choice(["ready", "ready", "draining", "switching"])
        self.scene.report(name, phase=phase, state=state, boot_id=self.random.choice(["boot-1", "boot-1", "boot-2"]))

    def lose(self) -> None:
        for _ in range(2):
            self.scene.feed(events.NodeUnreachable(self.random.choice(self.names), refused=True))

    def store(self) -> None:
        name = self.random.choice(self.names)
        blocks = extend_chain(ROOT, array("I", range(1, self.random.randint(2, 40))), 1)
        if self.random.random() < 0.3:
            self.scene.feed(events.NodeSnapshotTaken(name, self.seqs[name], [(None, blocks)]))
            return
        self.seqs[name] += self.random.choice([1, 1, 1, 2])
        event: dict[str, Any] = {"seq": self.seqs[name], "t": 0.0, "type": "stored", "parent_b64": None}
        event["chain_b64"] = b64encode(blocks).decode()
        self.scene.feed(events.NodeEvents(name, [event]))

    def edit(self) -> None:
        bands = [dict(band) for band in self.scene.document["bands"]]
        bands[1]["priority"] = self.random.choice([0, 500])
        nodes = [node | {"draining": self.random.random() < 0.2} for node in self.scene.document["nodes"]]
        self.scene.configure(bands=bands, nodes=nodes)

    def time(self) -> None:
        self.scene.wait(self.random.choice([0.01, 0.5, 3.0]), silent=tuple(self.random.sample(self.names, 1)))

    def settle(self) -> None:
        """All nodes are well again; everything that lives comes to its end."""
        nodes = [node | {"draining": False} for node in self.scene.document["nodes"]]
        self.scene.configure(nodes=nodes)
        for name, node in zip(self.names, nodes, strict=True):
            self.scene.report(name, phase=node["phase"], state="ready")
        for _ in range(1000):
            if not self.scene.yard.requests:
                return
            self.progress()
            self.scene.wait(0.05)
        raise AssertionError(f"still here: {[(s.stage, s.story) for s in self.scene.yard.requests.values()]}")

    def _one(self) -> list[str]:
        living = list(self.scene.yard.requests)
        return [self.random.choice(living)] if living else []


@pytest.mark.parametrize("seed", range(6))
def test_the_machines_agree_after_every_event_and_every_request_ends_once(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(1500):
        chaos.step()
    chaos.settle()
    chaos.scene.assert_nothing_is_held()
    records = [c.record["id"] for c in chaos.scene.of(commands.Journal) if c.record["kind"] == "request"]
    assert len(records) == len(set(records)) == chaos.count
    refused = [c.request_id for c in chaos.scene.of(commands.Refuse)]
    assert len(refused) == len(set(refused))
