"""Measures the KV directory: `make bench-index`, or `python -m bench.index [--peer PYTHON]`.

Beside Dynamo's radix tree where its Python binding can be had: PYTHON (or the variable SWITCHYARD_DYNAMO_PYTHON) names an
interpreter in whose environment `ai-dynamo-runtime` is installed. Both run the same workload in turn, each in a process of
its own, and the best median of the rounds counts on both sides. Without the peer its numbers are null and no target is judged.

Then what has a limit of its own: hashing a turn, the memory of 30 million blocks, a routing decision at 9 and 768 nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import report

ROOT = Path(__file__).resolve().parent.parent
PEER_VARIABLE = "SWITCHYARD_DYNAMO_PYTHON"
DECISION_LIMITS_US = {9: 200.0, 768: 1000.0}
HASHING_LIMIT_US = 100.0
MEMORY_LIMIT_MIB = 1e9 / 2**20


def run(python: str, module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a part of this benchmark prints, run by `python` in a process of its own."""
    done = subprocess.run(
        [python, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode != 0:
        sys.exit(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def find_peer(named: str | None) -> str | None:
    """An interpreter that can import the peer, or None. Exits when a named one cannot."""
    for python in filter(None, [named, os.environ.get(PEER_VARIABLE), sys.executable]):
        found = subprocess.run([python, "-c", "from dynamo.llm import RadixTree"], capture_output=True, check=False)
        if found.returncode == 0:
            return python
        if python == named:
            sys.exit(f"--peer: expected an interpreter that can import dynamo.llm, got {named}")
    return None


def best(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Each operation's least median over the rounds."""
    return {name: min(one["p50_us"][name] for one in rounds) for name in rounds[0]["p50_us"]} if rounds else {}


def compare(peer: str | None, branches: int, rounds: int) -> None:
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(rounds):
        if peer is not None:
            theirs.append(run(peer, "bench.index_workload", "--index", "dynamo", "--branches", str(branches)))
        ours.append(run(sys.executable, "bench.index_workload", "--index", "ours", "--branches", str(branches)))
    wrong = [one["wrong"] for one in (*ours, *theirs)]
    if any(wrong):
        sys.exit(f"look-ups that did not find the whole context: {wrong}")
    baseline = best(theirs)
    for name, value in best(ours).items():
        known = baseline.get(name)
        report(f"index.{name}.p50", value, "us", target=known, aim="at_most", baseline=known)
    least = min((one["memory_mib"] for one in theirs), default=None)
    million = round(ours[0]["residencies"] / 1e6, 1)
    value = max(one["memory_mib"] for one in ours)
    report(f"index.memory_of_{million}m_residencies", value, "MiB", target=least, aim="at_most", baseline=least)


def limits(branches: int) -> None:
    hashing = run(sys.executable, "bench.index_limits", "hashing")
    for block_tokens, found in hashing.items():
        name = f"index.hash_100k_plus_1k_tokens.blocks_of_{block_tokens}.p50"
        report(name, found["p50"], "us", target=HASHING_LIMIT_US, aim="at_most")
    memory = run(sys.executable, "bench.index_limits", "memory")
    report("index.memory_of_30m_blocks", memory["mib"], "MiB", target=MEMORY_LIMIT_MIB, aim="at_most")
    for nodes, limit_us in DECISION_LIMITS_US.items():
        found = run(sys.executable, "bench.index_limits", "decision", f"--nodes={nodes}", f"--branches={branches}")
        for share in ("p50", "p99"):
            report(f"index.match_at_{nodes}_nodes.{share}", found["match"][share], "us")
        report(f"index.decision_at_{nodes}_nodes.p50", found["decision"]["p50"], "us", target=limit_us, aim="at_most")
        report(f"index.decision_at_{nodes}_nodes.p99", found["decision"]["p99"], "us")
        for event, times in found["events"].items():
            report(f"index.event_at_{nodes}_nodes.{event}.p50", times["p50"], "us")
            report(f"index.event_at_{nodes}_nodes.{event}.p99", times["p99"], "us")


def main() -> None:
    options = argparse.ArgumentParser(description="Speed and memory of the KV directory; JSON lines.")
    options.add_argument("--peer", metavar="PYTHON", help="interpreter with ai-dynamo-runtime")
    options.add_argument("--branches", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=2)
    chosen = options.parse_args()
    compare(find_peer(chosen.peer), chosen.branches, chosen.rounds)
    limits(chosen.branches)


if __name__ == "__main__":
    main()
