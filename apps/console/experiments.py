"""Experiments as the What-if pages show them: words, badges, tables and what a chart is drawn of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from apps.console import formats
from apps.planning.experiments import Experiment
from controlplane.jobs import RUNNING

Json = Mapping[str, Any]
_JOB_TONES = {"done": "fine", "failed": "bad", "interrupted": "bad", "cancelled": "muted"}
_VERDICTS = {True: ("met", "fine"), False: ("missed", "bad"), None: ("not run", "muted")}


def number(value: float | None) -> str:
    if value is None:
        return formats.UNKNOWN
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def row(found: Experiment) -> dict[str, Any]:
    """One line of the list."""
    return {
        "name": found.name,
        "title": found.title,
        "problem": found.problem,
        "measured": found.measured_at,
        "job": _job(found),
        **(_told(found.report) if found.report else {"said": "", "tone": "muted", "basis": ""}),
    }


def _told(report: Json) -> dict[str, Any]:
    judged = [verdict["met"] for verdict in report["verdicts"] if verdict["met"] is not None]
    met = sum(judged)
    said = f"{met} of {formats.plural(len(judged), 'demand')} met" if judged else "nothing demanded"
    tone = "muted" if not judged else "fine" if met == len(judged) else "bad"
    return {"said": said, "tone": tone, "basis": _basis(report)}


def _basis(report: Json) -> str:
    asked = report["configuration"]
    seeds = asked.get("seeds") or [asked.get("seed")]
    parts = [formats.plural(len(seeds), "seed")]
    if asked.get("scored_s"):
        parts.append(f"{formats.duration(asked['scored_s'])} scored")
    if asked.get("warm_up_s"):
        parts.append(f"{formats.duration(asked['warm_up_s'])} of warm-up")
    lines = report["found"]
    run = sum(1 for line in lines if line["seeds"])
    if run < len(lines):
        parts.append(f"{run} of {len(lines)} figures run")
    return ", ".join(parts)


def _job(found: Experiment) -> dict[str, Any] | None:
    job = found.job
    if job is None:
        return None
    return {
        "state": job["state"],
        "tone": _JOB_TONES.get(job["state"], "warn"),
        "open": found.is_open,
        "running": job["state"] == RUNNING,
        "stopping": bool(job.get("stopping")),
        "share": f"{job.get('progress') or 0.0:.0%}",
        "step": job.get("step") or "",
        "by": job.get("asked_by") or "",
        "at": job.get("asked_at"),
        "reason": job.get("reason") or "",
        "problem": job.get("problem") or "",
        "how": "one seed, half of the time" if job.get("quick") else "three seeds, the whole time",
    }


def detail(found: Experiment) -> dict[str, Any]:
    """Everything of one: its demands, a chart a figure, all lines, what it was run with."""
    shown = row(found)
    report = found.report
    if report is None:
        return shown
    lines = [line for line in report["found"] if line["seeds"]]
    return shown | {
        "verdicts": [_verdict(verdict) for verdict in report["verdicts"]],
        "charts": [_chart(name, lines) for name in dict.fromkeys(line["figure"] for line in lines)],
        "lines": [_line(line) for line in lines],
        "missing": len(report["found"]) - len(lines),
        "notes": report["notes"],
        "configuration": json.dumps(report["configuration"], indent=1, default=str),
    }


def _verdict(verdict: Json) -> dict[str, Any]:
    said, tone = _VERDICTS[verdict["met"]]
    sign = "≥" if verdict["aim"] == "at_least" else "≤"
    return {
        "text": verdict["text"],
        "found": number(verdict["value"]),
        "target": f"{sign} {number(verdict['target'])}",
        "said": said,
        "tone": tone,
    }


def _line(line: Json) -> dict[str, Any]:
    return {
        "case": line["case"],
        "figure": line["figure"],
        "unit": line["unit"],
        "ours": number(line["value"]),
        "spread": "" if line["spread"] is None else f"± {number(line['spread'])}",
        "published": number(line["published"]),
        "ratio": formats.UNKNOWN if line["ratio"] is None else f"{line['ratio']:.2f}x",
        "seeds": line["seeds"],
    }


def _chart(figure: str, lines: list[Json]) -> dict[str, Any]:
    mine = [line for line in lines if line["figure"] == figure]
    unit = next((line["unit"] for line in mine if line["unit"]), "")
    data = {
        "unit": unit,
        "cases": [line["case"] for line in mine],
        "ours": [line["value"] for line in mine],
        "spread": [line["spread"] or 0 for line in mine],
        "published": [line["published"] for line in mine] if any(x["published"] is not None for x in mine) else None,
    }
    known = data["published"] is not None
    return {"figure": figure, "unit": unit, "data": json.dumps(data), "cases": len(mine), "published": known}
