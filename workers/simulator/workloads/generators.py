"""Closed-loop generators of the published agent workloads: CC, Putnam, OSWorld (a fit to published figures, no validation).

Parameters are read from a file like `data/workloads.yaml`. Contexts grow in whole blocks, rounded by chance so that means
stay; what is decoded comes back as the head of the next prompt's new part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from random import Random
from typing import Any

import yaml

from apps.kvcache.domain.events import BranchSignal, Relation
from apps.kvcache.domain.hashing import HASH_BYTES
from workers.simulator.clients import Script, Turn
from workers.simulator.workloads.blocks import content, whole_blocks

PARAMETERS = Path(__file__).with_name("data") / "workloads.yaml"
NAMES = ("CC", "Putnam", "OSWorld")


@cache
def parameters(path: Path = PARAMETERS) -> dict[str, Any]:
    """All workloads' parameters, and what they are meant to give under `target`."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def draw(rng: Random, spec: Mapping[str, Any] | float, scale: float = 1.0) -> float:
    """A lognormal draw by its mean and log-sigma, capped where the spec says so; or the number itself."""
    if isinstance(spec, (int, float)):
        return float(spec) * scale
    if "uniform" in spec:
        return rng.uniform(*spec["uniform"]) * scale
    sigma = spec.get("sigma", 0.0)
    value = rng.lognormvariate(log(spec["mean"]) - sigma * sigma / 2, sigma)
    return min(value, spec.get("cap", float("inf"))) * scale


def pick(rng: Random, mix: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry by its `share`."""
    at = rng.random()
    for entry in mix:
        at -= entry["share"]
        if at < 0:
            return entry
    return mix[-1]


@dataclass
class Agent:
    """Writes the script of one agent. `name` makes its content its own; all agents of a workload share the system prompt."""

    workload: str
    name: str
    rng: Random
    block_tokens: int
    output_scale: float = 1.0
    pause_scale: float = 1.0

    def __post_init__(self) -> None:
        self.p = parameters()[self.workload]
        self._pieces = 0

    def script(self) -> Script:
        return {"CC": self._coding, "Putnam": self._problem, "OSWorld": self._computer}[self.workload]()

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _new(self, tokens: float, least: int = 1) -> bytes:
        self._pieces += 1
        return content(f"{self.name}/{self._pieces}", whole_blocks(self.rng, tokens, self.block_tokens, least))

    def _system(self, kind: str, tokens: float) -> bytes:
        return content(f"{self.workload}/{kind}", round(tokens / self.block_tokens))

    def _pause(self, spec: Mapping[str, Any] | float) -> float:
        return draw(self.rng, spec, self.pause_scale)

    def _output(self) -> int:
        mix = self.p.get("output_tokens_mix")
        spec = pick(self.rng, mix) if mix else self.p["output_tokens"]
        return max(1, round(draw(self.rng, spec, self.output_scale)))

    def _turn(self, pause_s: float, chain: bytes, output_tokens: int, signal: BranchSignal) -> Turn:
        answer = self._new(output_tokens / self.output_scale, least=0)
        return Turn(pause_s, chain, len(chain) // HASH_BYTES * self.block_tokens, output_tokens, signal, answer)

    def _requests(self) -> int:
        return max(1, round(draw(self.rng, self.p["requests_per_agent"])))

    # ---- CC ------------------------------------------------------------------------------------------------------

    def _coding(self) -> Iterator[Turn]:
        """A coding agent: tool results, compaction, cold restarts, forks, sub-agents that it waits for."""
        p, rng = self.p, self.rng
        system = self._system("system", p["shared_system_tools_tokens"])
        compaction = p["compaction"]
        threshold = draw(rng, pick(rng, compaction["threshold_tokens"]))
        context = system + self._new(draw(rng, p["initial_user_tokens"]))
        branch, version, forks = self.name, 0, 0
        parent: str | None = None
        spawned = 0
        compacts = False
        total = self._requests()
        for number in range(total):
            helpers: tuple[Script, ...] = ()
            pause_s = self._pause(compaction["pause_s"] if compacts else p["pause_s"]) if number else 0.0
            if number and not compacts:
                context += self._new(draw(rng, p["append_tokens"]))
                if rng.random() < p["cold_restart"]["probability"]:
                    context = system + self._new(draw(rng, p["cold_restart"]["context_tokens"]))
                    version += 1
                elif rng.random() < p["fork"]["probability"]:
                    keep = rng.uniform(*p["fork"]["keep_ratio"])
                    kept = max(len(system), int(len(context) // HASH_BYTES * keep) * HASH_BYTES)
                    forks += 1
                    parent, branch, version = branch, f"{self.name}.f{forks}", 0
                    context = context[:kept] + self._new(draw(rng, p["append_tokens"]))
                elif rng.random() < p["subagents"]["spawn_probability"]:
                    helpers = tuple(self._helper(branch, spawned + at, p["subagents"]) for at in range(self._fan_out()))
                    spawned += len(helpers)
            output_tokens = self._output()
            compacts = len(context) // HASH_BYTES * self.block_tokens > threshold
            if compacts:
                output_tokens = max(1, round(draw(rng, compaction["summary_output_tokens"])))
            relation: Relation | None = None if parent is None else "fork"
            signal = BranchSignal(branch, version, parent, relation, number == total - 1, self.name, None, "")
            turn = self._turn(pause_s, context, output_tokens, signal)
            yield turn._replace(helpers=helpers) if helpers else turn
            if compacts:
                context = system + self._new(draw(rng, compaction["context_after_tokens"]))
                version += 1
            else:
                context += turn.output_chain

    def _fan_out(self) -> int:
        counts = self.p["subagents"].get("fan_out")
        if counts is None:
            return 1
        return int(pick(self.rng, [{"share": share, "count": count} for count, share in counts.items()])["count"])

    def _helper(self, parent: str, number: int, p: Mapping[str, Any]) -> Script:
        """A sub-agent with a context of its own. What its spec does not say is as for its parent."""
        helper = replace(self, name=f"{self.name}.s{number}", rng=Random(f"{self.name}/helper/{number}"))
        return helper._run_helper(parent, {**self.p, **p})

    def _run_helper(self, parent: str, p: Mapping[str, Any]) -> Iterator[Turn]:
        rng = self.rng
        context = self._system("helper", p["system_tokens"]) + self._new(draw(rng, p["private_tokens"]))
        total = max(1, round(draw(rng, p["requests"])))
        program = self.name.split(".")[0]
        for number in range(total):
            if number:
                context += self._new(draw(rng, p["append_tokens"]) + draw(rng, p.get("screenshot_tokens", 0)))
            output_tokens = max(1, round(draw(rng, p["output_tokens"], self.output_scale)))
            turn = self._turn(
                self._pause(p["pause_s"]) if number else 0.0,
                context,
                output_tokens,
                BranchSignal(self.name, 0, parent, "subagent", number == total - 1, program, None, ""),
            )
            yield turn
            context += turn.output_chain

    # ---- Putnam and OSWorld --------------------------------------------------------------------------------------

    def _problem(self) -> Iterator[Turn]:
        """One branch a problem, most of its time in decode."""
        yield from self._simple(self.p["append_tokens"], 0, 0.0)

    def _computer(self) -> Iterator[Turn]:
        """A screenshot each step, now and then a sub-agent; a pause for the reset before the task."""
        reset_s = self.p["reset_between_tasks_s"] * self.pause_scale * (0.5 + self.rng.random())
        yield from self._simple(self.p["append_tokens"], self.p["screenshot_tokens"], reset_s)

    def _simple(self, append: Mapping[str, Any], fixed_tokens: int, first_pause_s: float) -> Iterator[Turn]:
        p, rng = self.p, self.rng
        context = self._system("system", p["shared_system_tools_tokens"])
        context += self._new(draw(rng, p["initial_user_tokens"]) + fixed_tokens)
        total = self._requests()
        helpers_of = p.get("subagents")
        spawned = 0
        for number in range(total):
            helpers: tuple[Script, ...] = ()
            if number:
                context += self._new(draw(rng, append) + fixed_tokens)
                if helpers_of and rng.random() < helpers_of["spawn_probability"]:
                    helpers = (self._helper(self.name, spawned, helpers_of),)
                    spawned += 1
            pause_s = self._pause(p["pause_s"]) if number else first_pause_s
            signal = BranchSignal(self.name, 0, None, None, number == total - 1, self.name, None, "")
            turn = self._turn(pause_s, context, self._output(), signal)
            yield turn._replace(helpers=helpers) if helpers else turn
            context += turn.output_chain


def agent(
    workload: str,
    seed: int,
    number: int,
    block_tokens: int,
    output_scale: float = 1.0,
    pause_scale: float = 1.0,
) -> Script:
    """The script of agent `number` of a workload under a seed."""
    name = f"{workload}-{seed}-{number}"
    return Agent(workload, name, Random(f"{name}/script"), block_tokens, output_scale, pause_scale).script()


def skipped(script: Script, turns: int) -> Script:
    """A script from its middle on: the first `turns` are dropped, its next turn has no pause."""
    for _ in range(turns):
        if next(script, None) is None:
            return iter(())
    return script
