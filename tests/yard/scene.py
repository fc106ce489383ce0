"""A yard in virtual time: a test says what happens and reads what the yard asks for."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import PromptHasher
from tests.gateway.world import document, node
from workers.yard import commands, events
from workers.yard.config import PartitionConfig
from workers.yard.yard import Yard

PHASES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


class Scene:
    """Keeps the clock and the nodes' statuses; `log` holds every command so far, `step` those of the last event."""

    def __init__(
        self, phases: dict[str, str] | None = None, limit_per_node: int = 1, decode_limit: int = 64, **changes: Any
    ) -> None:
        self.now = 1000.0
        phases = phases or PHASES
        described = [node(name, order, phase, "http://h") for order, (name, phase) in enumerate(phases.items())]
        nodes = changes.pop("nodes", described)
        self.document = document(nodes, **changes)
        self.document["flow"]["prefill"]["limit_per_node"] = limit_per_node
        self.document["flow"]["decode"]["limit_per_node"] = decode_limit
        self.yard = Yard(PartitionConfig.parse(self.document), self.now)
        self.statuses = {name: node_state(phase) for name, phase in phases.items()}
        self.log: list[commands.Command] = []
        self.step: list[commands.Command] = []
        self._hasher = PromptHasher("glm", "fp8", 64, 1)
        for name in phases:
            self.report(name)

    # ---- what happens

    def feed(self, event: events.Event) -> list[commands.Command]:
        self.step = self.yard.handle(self.now, event)
        self.log += self.step
        self.yard.check_integrity()
        return self.step

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> list[commands.Command]:
        """Time passes; deadlines are kept and every node but the silent ones reports once a second."""
        end, seen = self.now + seconds, len(self.log)
        next_report = self.now + 1.0
        while True:
            due = min(self.yard.next_deadline() or end, next_report, end)
            self.now = max(self.now, due)
            self.feed(events.Tick())
            if self.now >= next_report:
                next_report += 1.0
                for name in self.statuses:
                    if name not in silent:
                        self.report(name)
            if self.now >= end:
                return self.log[seen:]

    def report(self, name: str, **changes: Any) -> list[commands.Command]:
        self.statuses[name] = replace(self.statuses[name], **changes)
        return self.feed(events.NodeStatus(name, self.statuses[name]))

    def configure(self, **changes: Any) -> list[commands.Command]:
        self.document = self.document | changes | {"version": self.document["version"] + 1}
        return self.feed(events.Configured(PartitionConfig.parse(self.document)))

    def arrive(
        self,
        request_id: str,
        band: str = "standard",
        blocks: int = 10,
        output_tokens: int = 100,
        first_id: int | None = None,
        branch: str | None = None,
        **fields: Any,
    ) -> list[commands.Command]:
        """A request of `blocks` full blocks, a prompt of its own unless `first_id` is given."""
        first = first_id if first_id is not None else 10_000 * (1 + len(self.log))
        prompt = self._hasher.hash("acme", array("I", range(first, first + blocks)), 64 * blocks + 1)
        request = events.YardRequest(
            request_id=request_id,
            tenant="acme",
            band=band,
            flow_id=fields.pop("flow_id", "acme"),
            bytes=1000,
            prompt=prompt,
            output_tokens=output_tokens,
            received_at=self.now,
            branch=BranchSignal(branch_id=branch, tenant="acme"),
            **fields,
        )
        return self.feed(events.Arrived(request))

    def prefilled(self, request_id: str, first_finish: str | None = None) -> list[commands.Command]:
        tokens = self.yard.requests[request_id].request.prompt.tokens
        return self.feed(
            events.PrefillFinished(request_id, events.PrefillResult(0, 0, tokens, first_finish=first_finish))
        )

    def decoded(self, request_id: str, tokens: int) -> list[commands.Command]:
        return self.feed(events.DecodeProgress(request_id, tokens))

    def done(self, request_id: str, output_tokens: int = 100) -> list[commands.Command]:
        return self.feed(events.DecodeFinished(request_id, "length", output_tokens))

    # ---- what the yard asked for

    def of(self, kind: type, request_id: str | None = None) -> list[Any]:
        found: list[Any] = [command for command in self.log if isinstance(command, kind)]
        return [c for c in found if request_id is None or c.request_id == request_id]

    @property
    def placed(self) -> list[str]:
        """Requests in the order in which they were sent to prefill nodes."""
        return [command.request_id for command in self.of(commands.StartPrefill)]

    def prefill_node(self, request_id: str) -> str:
        return str(self.of(commands.StartPrefill, request_id)[-1].node)

    def decode_node(self, request_id: str) -> str:
        return str(self.of(commands.StartDecode, request_id)[-1].node)

    def record(self, request_id: str) -> dict[str, Any]:
        journal = [c.record for c in self.of(commands.Journal) if c.record["kind"] == "request"]
        (record,) = [record for record in journal if record["id"] == request_id]
        return record

    def refusal(self, request_id: str) -> commands.Refuse:
        (refusal,) = self.of(commands.Refuse, request_id)
        return refusal

    def assert_nothing_is_held(self) -> None:
        """No request, no place, no load is left anywhere."""
        snapshot = self.yard.snapshot(self.now)
        assert not self.yard.requests
        assert snapshot["stages"]["prefill"]["in_flight"] == 0
        assert snapshot["stages"]["decode"]["in_flight"] == snapshot["stages"]["decode"]["announced"] == 0
        assert all(n["running_decode"] == n["announced_decode"] == 0 for n in snapshot["nodes"])
        assert all(n["predicted_wait_s"] == 0 for n in snapshot["nodes"])
        counts = snapshot["requests"]
        assert counts["arrived"] == sum(counts[end] for end in ("completed", "failed", "dropped", "cancelled"))


def node_state(phase: str) -> events.NodeState:
    return events.NodeState(
        phase=phase,
        target_phase=phase,
        state="ready",
        generation=0,
        boot_id="boot-1",
        running_prefill=0,
        queued_prefill=0,
        running_decode=0,
        queued_decode=0,
        queued_tokens=0,
        pool_used_blocks=0,
        pool_capacity_blocks=20_000,
        pool_referenced_blocks=0,
        kv_free_tokens=5_000_000,
        max_decode_batch=64,
        kv_tokens=5_000_000,
        prefill_chunk_tokens=8192,
    )
