"""The life of one request, as its page shows it: stages with their times, and every candidate the router weighed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apps.console import formats
from apps.console.present import DROP_REASONS, LOST_CAUSES

Json = Mapping[str, Any]
# The terms of a predicted TTFT in the order in which they are drawn.
TERMS = (
    ("remaining_s", "batch under way"),
    ("queue_s", "node’s queue"),
    ("service_s", "own prefill"),
    ("fetch_overflow_s", "fetch not hidden"),
    ("duplicate_s", "copy made twice"),
)
STAGES = {
    "queued": "queued",
    "waiting": "waiting for a node",
    "prefilling": "prefill",
    "handing-over": "transfer",
    "decoding": "decode",
}
GOOD = frozenset({"completed"})


def row(entry: Json) -> dict[str, Any]:
    """A line of the list, from a stored record or a living request's row."""
    prompt, cached = entry.get("prompt_tokens"), entry.get("cached_tokens")
    outcome = str(entry.get("outcome") or entry.get("stage") or "")
    return {
        "id": entry["id"],
        "short": _short(str(entry["id"])),
        "at": entry.get("t"),
        "tenant": entry.get("tenant") or "–",
        "band": entry.get("band") or "–",
        "branch": entry.get("branch") or "",
        "prefill": entry.get("prefill_node") or "–",
        "decode": entry.get("decode_node") or "–",
        "prompt": formats.count(prompt),
        "cached": formats.percent(cached / prompt if prompt and cached is not None else None),
        "output": formats.count(entry.get("output_tokens")),
        "queue": formats.duration(entry.get("queue_s")),
        "ttft": formats.duration(entry.get("ttft_s")),
        "predicted": formats.duration(entry.get("predicted_ttft_s")),
        "e2e": formats.duration(entry.get("e2e_s")),
        "outcome": outcome,
        "drop": DROP_REASONS.get(str(entry.get("drop_code")), ""),
        "tone": tone(outcome),
        "reason": entry.get("reason") or "",
    }


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= 14 else f"{request_id[:6]}…{request_id[-6:]}"


def tone(outcome: str) -> str:
    return "fine" if outcome in GOOD else "muted" if outcome in ("cancelled", *STAGES) else "bad"


def moves(story: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The story's rows by name: `{"t", "was", "now", "why"}`."""
    rows = [row for row in story if not isinstance(row, str)]  # lines of text, as they were stored once
    return [{"t": t, "was": was, "now": now, "why": why} for t, was, now, why in rows]


def life(entry: Json, now: float) -> dict[str, Any]:
    """Stages with share and length, in order. `entry` is a record's detail or a living request; `now` unix seconds."""
    told = moves(entry.get("story") or [])
    began = entry.get("arrived_at")
    end_t = entry.get("t") if entry.get("outcome") else now
    if began is None:
        e2e = entry.get("e2e_s")
        began = end_t - e2e if end_t is not None and e2e is not None else None
    parts = _parts(told, began, end_t, entry) if began is not None and end_t is not None else []
    whole = sum(part["s"] for part in parts) or 1.0
    at = 0.0
    for part in parts:
        part["left"] = f"{at / whole * 100:.3f}%"
        part["width"] = f"{part['s'] / whole * 100:.3f}%"
        part["length"] = formats.duration(part["s"])
        part["percent"] = formats.percent(part["s"] / whole)
        at += part["s"]
    first = entry.get("ttft_s")
    return {
        "parts": parts,
        "moves": [{**move, "after": formats.duration(move["t"] - began) if began else ""} for move in told],
        "first": f"{min(1.0, first / whole) * 100:.3f}%" if first is not None and parts else "",
        "whole": formats.duration(whole if parts else None),
    }


def _parts(told: list[dict[str, Any]], began: float, end: float, entry: Json) -> list[dict[str, Any]]:
    """Stretches between moves; a prefill is told apart into the node's queue, fetch and computing, as the node said."""
    stops = [(began, "queued"), *[(move["t"], move["now"]) for move in told]]
    parts: list[dict[str, Any]] = []
    for i, (t, stage) in enumerate(stops):
        until = stops[i + 1][0] if i + 1 < len(stops) else end
        if stage not in STAGES or until <= t:
            continue
        if stage == "prefilling" and entry.get("timings") and not any(p["kind"] == "compute" for p in parts):
            parts += _prefill_parts(until - t, entry["timings"])
        else:
            parts.append({"kind": stage, "label": STAGES[stage], "s": until - t})
    return parts


def _prefill_parts(length: float, timings: Json) -> list[dict[str, Any]]:
    named = (
        ("node-queue", "node's queue", "queued_s"),
        ("fetch", "fetch", "fetch_s"),
        ("compute", "prefill", "prefill_s"),
    )
    parts = []
    left = length
    for kind, label, name in named:
        seconds = min(left, float(timings.get(name) or 0.0))
        left -= seconds
        if seconds > 0:
            parts.append({"kind": kind, "label": label, "s": seconds})
    if left > 0.0005:
        parts.append({"kind": "wire", "label": "on the wire", "s": left})
    return parts


def candidates(entry: Json) -> dict[str, Any]:
    """Every node the router weighed, best first, with its terms as parts of a bar."""
    terms = sorted(entry.get("router_terms") or [], key=lambda row: (row.get("why_not") is not None, row["total_s"]))
    most = max((row["total_s"] for row in terms if not row.get("why_not")), default=0.0) or 1.0
    rows = []
    for term in (term for term in terms if not term.get("why_not")):
        at, bars = 0.0, []
        for name, label in TERMS:
            seconds = float(term.get(name) or 0.0)
            if seconds > 0:
                bars.append(
                    {"name": name, "left": _share(at, most), "width": _share(seconds, most),
                     "text": f"{label} {formats.duration(seconds)}"}
                )  # fmt: skip
                at += seconds
        rows.append(
            {
                "node": term["node"],
                "won": term["node"] == entry.get("prefill_node"),
                "total": formats.duration(term["total_s"]),
                "mode": term.get("mode") or "",
                "cached": formats.count(term.get("cached_tokens")),
                "fetched": formats.count(term.get("fetch_tokens")),
                "fetch": formats.duration(term.get("fetch_s")) if term.get("fetch_s") else formats.UNKNOWN,
                "bars": bars,
                **{name: formats.duration(term[name]) if term.get(name) else formats.UNKNOWN for name, _ in TERMS},
            }
        )
    passed_over: dict[str, list[str]] = {}
    for term in terms:
        if term.get("why_not"):
            passed_over.setdefault(str(term["why_not"]).replace("-", " "), []).append(str(term["node"]))
    return {"rows": rows, "terms": TERMS, "passed_over": passed_over}


def lost(entry: Json) -> list[dict[str, str]]:
    """What had to be computed again, by cause."""
    found = entry.get("lost") or {}
    return [{"label": LOST_CAUSES.get(cause, cause), "tokens": formats.exact(n)} for cause, n in found.items() if n]


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, min(1.0, part / whole)) * 100:.2f}%"
