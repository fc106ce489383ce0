"""Live branches as a tree that says of each why its blocks are kept, and of what is gone why it was evicted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apps.console import formats
from apps.console.present import LOST_CAUSES

Json = Mapping[str, Any]
KINDS = {
    "new": "conversation",
    "continuation": "conversation",
    "version": "new version",
    "fork": "fork",
    "subagent": "sub-agent",
}
CLOSED = {"ended": "it was ended", "lease": "its lease ran out", "signal": "it was ended"}


def tree(rows: Sequence[Json], block_tokens: int) -> list[dict[str, Any]]:
    """Rows in the order of a walk through the tree, each with its `depth`; a row without a parent among them is a root."""
    by_id = {row["id"]: row for row in rows}
    children: dict[str | None, list[Json]] = {}
    for row in rows:
        parent = row["parent"] if row["parent"] in by_id and row["parent"] != row["id"] else None
        children.setdefault(parent, []).append(row)
    shown: list[dict[str, Any]] = []
    seen: set[str] = set()

    def walk(parent: str | None, depth: int) -> None:
        for row in children.get(parent, []):
            if row["id"] in seen:
                continue
            seen.add(row["id"])
            shown.append(branch(row, block_tokens) | {"depth": depth, "children": len(children.get(row["id"], []))})
            walk(row["id"], depth + 1)

    walk(None, 0)
    # What is left hangs in a ring of parents; it is shown at the top rather than not at all.
    shown += [branch(row, block_tokens) | {"depth": 0, "children": 0} for row in rows if row["id"] not in seen]
    return shown


def branch(row: Json, block_tokens: int) -> dict[str, Any]:
    blocks, held = row["blocks"], row["held"]
    most = max(held.values(), default=0)
    gone = sum(row["gone"].values())
    return {
        "id": row["id"],
        "short": _short(row["id"], row["tenant"]),
        "tenant": row["tenant"],
        "kind": KINDS.get(row["kind"], row["kind"]),
        "inferred": row["inferred"],
        "program": row["program"] or "",
        "version": row["version"],
        "parent": row["parent"] or "",
        "blocks": formats.exact(blocks),
        "tokens": formats.count(blocks * block_tokens),
        "shared": formats.exact(row["shared_blocks"]),
        "held_share": _share(most, blocks),
        "gone_share": _share(gone, blocks),
        "held": _held(held),
        "held_all": " · ".join(f"{node} {formats.exact(n)}" for node, n in sorted(held.items(), key=_most)),
        "homes": " · ".join(f"{phase} on {node}" for phase, node in sorted(row["homes"].items(), reverse=True)),
        "idle": formats.duration(row["idle_s"]),
        "open": len(row["open_requests"]),
        "requests": row["open_requests"],
        "kept": kept(row),
        "evicted": evicted(row),
    }  # fmt: skip


def _held(held: Mapping[str, int]) -> str:
    """The copy that reaches furthest, and how many others there are."""
    if not held:
        return "held nowhere"
    node, blocks = min(held.items(), key=_most)
    more = f", {len(held) - 1} more cop{'y' if len(held) == 2 else 'ies'}" if len(held) > 1 else ""
    return f"{formats.exact(blocks)} on {node}{more}"


def _most(pair: tuple[str, int]) -> tuple[int, str]:
    return -pair[1], pair[0]


def kept(row: Json) -> str:
    """Why the branch still counts on its blocks."""
    left = formats.duration(max(0.0, row["lease_left_s"]))
    if row["open_requests"]:
        n = len(row["open_requests"])
        return f"{formats.plural(n, 'request')} of it {'is' if n == 1 else 'are'} open"
    if row["held_by_subagents"]:
        return f"a sub-agent of it lives or has just ended; at most {left} more"
    pause = row["pause_s"]
    rhythm = f"its longest pause was {formats.duration(pause)}" if pause is not None else "it has made no pause yet"
    return f"it may go on: heard {formats.age(row['idle_s'])}, {rhythm}; its lease ends in {left}"


def evicted(row: Json) -> str:
    """What of its context is gone, and why; empty when nothing is."""
    parts = [f"{formats.exact(n)} {LOST_CAUSES.get(cause, cause)}" for cause, n in row["gone"].items() if n]
    return " · ".join(parts)


def closed(row: Json) -> dict[str, Any]:
    """A branch that counts on nothing any more: its blocks go first when room is needed."""
    return {
        "id": row["id"],
        "at": row["t"],
        "blocks": formats.exact(row["blocks"]),
        "why": CLOSED.get(row["cause"], row["cause"]),
    }


def _short(branch_id: str, tenant: str) -> str:
    return branch_id.removeprefix(f"{tenant}/")


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, min(1.0, part / whole)) * 100:.1f}%" if whole else "0%"


def totals(rows: Mapping[str, Json], lost_causes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Reuse by node, tenant or workload, the largest first."""
    found = []
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["prompt_tokens"]):
        prompt, ideal, actual = row["prompt_tokens"], row["ideal_tokens"], row["actual_tokens"]
        lost = {cause: n for cause, n in row["lost"].items() if n}
        worst = max(lost, key=lambda cause: lost[cause], default="")
        found.append(
            {
                "name": name or "unnamed",
                "prompt": formats.count(prompt),
                "actual": formats.percent(actual / prompt if prompt else None, 1),
                "ideal": formats.percent(ideal / prompt if prompt else None, 1),
                "actual_share": _share(actual, prompt),
                "gap_share": _share(max(0, ideal - actual), prompt),
                "lost": formats.count(ideal - actual),
                "worst": f"{lost_causes.get(worst, worst)} {formats.count(lost[worst])}" if worst else "nothing",
            }
        )
    return found
