"""Capacity planning by simulation: the best split, the most load under an SLO, how many nodes are needed.

Each question is a search over short simulated runs of our own system. Load grows in agents (closed loop); a load is carried
when the P95 TTFT stays within the SLO and nobody is refused for good. Splits are searched as a hill: throughput rises
towards the best one from both sides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from controlplane import jobs
from controlplane.jobs import Progress
from workers.simulator.experiments.runs import Cancelled, RunSpec, execute
from workers.simulator.hardware import GLM, hardware
from workers.simulator.workloads.generators import NAMES

Kind = Literal["best-split", "max-load", "nodes-needed"]
KINDS: tuple[Kind, ...] = ("best-split", "max-load", "nodes-needed")
MOST_AGENTS = 20_000
MOST_NODES = 256
EXACT_RATIO = 0.05


class QuestionError(ValueError):
    """A question that cannot be answered: `field` and what was expected there."""

    def __init__(self, field_name: str, expected: str, got: object) -> None:
        super().__init__(f"{field_name}: expected {expected}, got {got!r}")
        self.field = field_name
        self.expected = expected


@dataclass(frozen=True)
class Question:
    """`agents` is the load of `best-split` and `nodes-needed`; `nodes` the cluster of `best-split` and `max-load`."""

    kind: Kind
    workload: str = "CC"
    hardware: str = GLM
    nodes: int = 9
    agents: int = 90
    slo_ttft_s: float = 15.0
    warm_up_s: float = 600.0
    scored_s: float = 900.0
    seed: int = 1

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Question:
        """Read one from JSON values. Raises QuestionError naming the field."""
        unknown = sorted(set(document) - {"kind", *cls.__dataclass_fields__})
        if unknown:
            raise QuestionError(
                unknown[0], f"no such field (known: {', '.join(cls.__dataclass_fields__)})", document[unknown[0]]
            )
        if document.get("kind") not in KINDS:
            raise QuestionError("kind", f"one of {', '.join(KINDS)}", document.get("kind"))
        if document.get("workload", "CC") not in NAMES:
            raise QuestionError("workload", f"one of {', '.join(NAMES)}", document["workload"])
        for name, low, high in (("nodes", 2, MOST_NODES), ("agents", 1, MOST_AGENTS), ("seed", 0, 2**31)):
            value = document.get(name, getattr(cls, name))
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise QuestionError(name, f"a whole number from {low} to {high}", value)
        for name, most in (("slo_ttft_s", 3600.0), ("warm_up_s", 7200.0), ("scored_s", 7200.0)):
            value = document.get(name, getattr(cls, name))
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                raise QuestionError(name, f"seconds above 0, at most {most:g}", value)
        try:
            hardware(document.get("hardware", GLM))
        except ValueError as problem:
            raise QuestionError("hardware", str(problem).partition("expected ")[2], document["hardware"]) from None
        return cls(**document)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the search."""

    nodes: int
    prefill_nodes: int
    agents: int
    throughput_rps: float
    ttft_p95_s: float
    e2e_mean_s: float
    carried: bool


@dataclass
class Answer:
    question: Question
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Answers a question. `progress(share, text)` may answer False: then `Cancelled` is raised. The share is of the runs that
    the search is expected to need."""

    def __init__(self, question: Question, progress: Progress | None = None) -> None:
        self.question = question
        self.answer = Answer(question)
        self._progress = progress
        self._known: dict[tuple[int, int, int], Trial] = {}
        self._expected = 8.0

    def run(self) -> Answer:
        """Raises Cancelled."""
        question, answer = self.question, self.answer
        if question.kind == "best-split":
            self._expected = 5
            answer.best = self._best_split(question.nodes, question.agents)
            answer.reason = f"the split with the highest throughput at {question.agents} agents"
        elif question.kind == "max-load":
            self._expected = 20
            self._max_load()
        else:
            self._expected = 20
            self._nodes_needed()
        self._tell("done", 1.0)
        return answer

    def _tell(self, text: str, share: float | None = None) -> None:
        made = len(self._known)
        if share is None:
            share = min(0.99, made / (made + max(1.0, self._expected - made)))
        if self._progress is not None and not self._progress(share, text):
            raise Cancelled

    def _try(self, nodes: int, prefill: int, agents: int) -> Trial:
        known = self._known.get((nodes, prefill, agents))
        if known is not None:
            return known
        self._tell(f"{prefill}P{nodes - prefill}D with {agents} agents")
        q = self.question
        spec = RunSpec(
            f"switchyard-fixed:{prefill}P{nodes - prefill}D", ((0.0, ((q.workload, agents),)),), seed=q.seed,
            warm_up_s=q.warm_up_s, scored_s=q.scored_s, hardware=q.hardware, nodes=nodes, prefill_nodes=prefill,
            slo_ttft_s=q.slo_ttft_s,
        )  # fmt: skip
        figures = execute(spec)
        carried = figures["ttft_p95_s"] <= q.slo_ttft_s and figures["failed"] == 0 and figures["requests"] > 0
        trial = Trial(
            nodes, prefill, agents, figures["throughput_rps"], figures["ttft_p95_s"], figures["e2e_mean_s"], carried
        )
        self._known[nodes, prefill, agents] = trial
        self.answer.trials.append(trial)
        return trial

    def _best_split(self, nodes: int, agents: int, start: int | None = None) -> Trial:
        """Climb from `start` (or a third of the nodes) while a neighbour is better."""
        at = min(nodes - 1, max(1, start if start is not None else round(nodes / 3)))
        best = self._try(nodes, at, agents)
        for step in (1, -1):
            while 1 <= best.prefill_nodes + step <= nodes - 1:
                other = self._try(nodes, best.prefill_nodes + step, agents)
                if _merit(other) <= _merit(best):
                    break
                best = other
            if best.prefill_nodes != at:
                break
        return best

    def _max_load(self) -> None:
        """Double the agents until the SLO breaks at the best split, then halve the gap."""
        q, answer = self.question, self.answer
        low, high = 0, max(2, q.nodes * 4)
        split: int | None = None
        while high <= MOST_AGENTS:
            trial = self._best_split(q.nodes, high, split)
            split = trial.prefill_nodes
            if not trial.carried:
                break
            answer.best, low, high = trial, high, high * 2
        else:
            answer.reason = f"{MOST_AGENTS} agents are still carried"
            return
        while high - low > max(1, EXACT_RATIO * high):
            middle = (low + high) // 2
            trial = self._best_split(q.nodes, middle, split)
            if trial.carried:
                answer.best, low = trial, middle
            else:
                high = middle
        answer.reason = (
            f"the most agents whose P95 TTFT stays within {q.slo_ttft_s:g} s, to {EXACT_RATIO:.0%}"
            if answer.best is not None
            else f"not even {high} agents stay within {q.slo_ttft_s:g} s"
        )

    def _nodes_needed(self) -> None:
        """Grow the cluster until the load is carried, then shrink it."""
        q, answer = self.question, self.answer
        low, high = 1, 2
        share: float | None = None

        def best(nodes: int) -> Trial:
            nonlocal share
            trial = self._best_split(nodes, q.agents, round(nodes * share) if share is not None else None)
            share = trial.prefill_nodes / nodes
            return trial

        while high <= MOST_NODES:
            trial = best(high)
            if trial.carried:
                answer.best = trial
                break
            low, high = high, high * 2
        else:
            answer.reason = f"{MOST_NODES} nodes do not carry {q.agents} agents within {q.slo_ttft_s:g} s"
            return
        while high - low > 1:
            middle = (low + high) // 2
            trial = best(middle)
            if trial.carried:
                answer.best, high = trial, middle
            else:
                low = middle
        answer.reason = f"the fewest nodes that carry {q.agents} agents within {q.slo_ttft_s:g} s"


def _merit(trial: Trial) -> tuple[bool, float]:
    """A split that keeps to the SLO before one that does not, then throughput."""
    return trial.carried, trial.throughput_rps


class Job(jobs.Job):
    """A question asked for later."""

    def __init__(self, folder: Path, job_id: str) -> None:
        try:
            super().__init__(folder, job_id)
        except ValueError:
            raise QuestionError("job_id", "letters, digits, - and _", job_id) from None

    def run(self, question: Question) -> dict[str, Any]:
        """Answer the question; the file says how far it is all the while."""

        def work(progress: Progress) -> dict[str, Any]:
            planner = Planner(question, progress)
            with suppress(Cancelled):
                planner.run()
            return planner.answer.as_dict()

        return self.carry_out({"question": asdict(question)}, work)
