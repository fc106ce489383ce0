"""From what planning knows of a partition's split (`apps.planning.selectors.split_view`) to what the Split page shows.

Pure. Times become unix seconds, so that the browser tells them in the reader's zone; shares are CSS percentages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from apps.console import formats
from apps.planning.choices import Cause, Mode, OrderState, StepState

Json = Mapping[str, Any]
CANDIDATES_SHOWN = 12
SLICES_SHOWN = 10
CELLS_SHOWN = 64
MODE_MEANS = {
    Mode.AUTOMATIC: "the planner switches by itself",
    Mode.APPROVE: "the planner proposes, a person approves",
    Mode.ADVISORY: "the planner only says what it would do",
    Mode.FROZEN: "the planner changes nothing",
}


def present_plan(view: Json, now: float, observed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything the Split page shows. `now` is unix seconds; `observed` what each node is doing, as the gateway sees it."""
    moving = [order for order in view["active_orders"] if order["state"] != OrderState.COOLING]
    cooling = [order for order in view["active_orders"] if order["state"] == OrderState.COOLING]
    decision = _decision(view["last_decision"]) if view["last_decision"] else None
    proposal = _proposal(view["open_proposal"]) if view["open_proposal"] else None
    return {
        "headline": _headline(view, moving, decision),
        "policy": _policy(view["policy"]),
        "marks": _marks(view, observed or {}),
        "forces": [_force(force) for force in (view["forced"] or {}).get("forces", [])],
        "decision": decision,
        "proposal": proposal,
        "active": [_order(order, now) for order in moving],
        "history": [_order(order, now) for order in cooling + list(view["history"])],
        "fits": [_fit(fit) for fit in view["fits"] if fit["state"] != "retired"],
    }


def label(split: Json) -> str:
    """Nodes per phase, as 4P5D; mixed nodes as 1M."""
    mixed = len(split.get("mixed") or [])
    return f"{len(split['prefill'])}P{len(split['decode'])}D" + (f"{mixed}M" if mixed else "")


def _headline(view: Json, moving: Sequence[Json], decision: Json | None) -> dict[str, str]:
    now = label(view["current"])
    policy = view["policy"]
    if moving:
        order = moving[0]
        return {"tone": "warn", "text": f"Switching to {label(order['to'])}", "reason": order["reason"]}
    if view["forced"]:
        force = view["forced"]["forces"][0]
        what = f"{force['node']} forced" if force["node"] else f"Forced to {label(view['forced'])}"
        return {"tone": "warn", "text": what, "reason": f"{force['forced_by']}: {force['reason']}"}
    if policy["mode"] == Mode.FROZEN:
        by = policy["frozen_by"] or "someone"
        return {
            "tone": "warn",
            "text": f"Frozen at {now}",
            "reason": f"{by}: {policy['freeze_reason'] or 'no reason given'}",
        }
    if view["open_proposal"]:
        proposal = view["open_proposal"]
        return {"tone": "ask", "text": f"Proposes {label(proposal)}", "reason": proposal["reason"]}
    if decision is None:
        window = formats.duration(policy["slice_s"] * policy["slices_per_window"])
        return {
            "tone": "fine",
            "text": f"{now}, not judged yet",
            "reason": f"The planner decides at the end of each window of {window}; the first has not ended.",
        }
    if decision["verdict"] == "hold":
        return {"tone": "fine", "text": f"Holds {now}", "reason": decision["reason"]}
    return {"tone": "fine", "text": f"Runs {now}", "reason": decision["reason"]}


def _policy(policy: Json) -> dict[str, Any]:
    mode = Mode(policy["mode"])
    votes = policy["approvals_required"]
    return {
        "mode": mode.value,
        "mode_label": mode.label,
        "mode_means": MODE_MEANS[mode],
        "frozen": mode == Mode.FROZEN,
        "frozen_until": _unix(policy["frozen_until"]),
        "freeze_reason": policy["freeze_reason"],
        "frozen_by": policy["frozen_by"],
        "thaw_label": Mode(policy["thaw_mode"]).label,
        "window": formats.duration(policy["slice_s"] * policy["slices_per_window"]),
        "slices": f"{policy['slices_per_window']} slices of {formats.duration(policy['slice_s'])}",
        "cooldown": formats.duration(policy["cooldown_s"]),
        "drain_deadline": formats.duration(policy["drain_deadline_s"]),
        "slo": formats.duration(policy["slo_ttft_s"]),
        "approvals": formats.plural(votes, "approval") + (", own ones count" if policy["self_approval"] else ""),
    }


# -- the three marks -------------------------------------------------------------------------------------------------


def _marks(view: Json, observed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Current, proposed and forced, one cell a node in node order, so that a column is one node."""
    names = [node["name"] for node in view["current"]["nodes"] if node["enabled"]]
    current = _phase_by_node(view["current"])
    seen = current | {name: kind for name, kind in observed.items() if name in current}
    note = "as the gateway sees it" if observed else "as configured; the gateway is silent"
    rows = [_mark("current", "Current", view["current"], names, seen, seen, note)]
    if view["open_proposal"]:
        proposed = _phase_by_node(view["proposed"])
        note = f"proposal {view['open_proposal']['id']}"
        rows.append(_mark("proposed", "Proposed", view["proposed"], names, proposed, current, note))
    else:
        rows.append(_no_mark("proposed", "Proposed", "no open proposal"))
    if view["forced"]:
        forces = view["forced"]["forces"]
        nodes = ", ".join(force["node"] for force in forces if force["node"])
        note = f"only {nodes}" if all(force["node"] for force in forces) else "the whole split"
        phases = view["forced"]["phases"]
        rows.append(_mark("forced", "Forced", view["forced"], names, phases, current, note))
    else:
        rows.append(_no_mark("forced", "Forced", "nothing is forced"))
    return rows


def _phase_by_node(split: Json) -> dict[str, str]:
    return {name: phase for phase in ("prefill", "decode", "mixed") for name in split.get(phase) or []}


def _mark(
    name: str, title: str, split: Json, names: Sequence[str], phases: Json, current: Json, note: str
) -> dict[str, Any]:
    if len(names) > CELLS_SHOWN:
        return {"id": name, "title": title, "text": label(split), "note": note, "cells": _runs(names, phases, current)}
    cells = [
        {
            "grow": 1,
            "name": node,
            "short": node.rpartition("-")[2],
            "kind": phases.get(node, ""),
            "changed": bool(phases.get(node)) and phases.get(node) != current.get(node),
        }
        for node in names
    ]
    return {"id": name, "title": title, "text": label(split), "note": note, "cells": cells}


def _runs(names: Sequence[str], phases: Json, current: Json) -> list[dict[str, Any]]:
    """Where a cell a node would be too thin to see: one cell a phase, those that would change apart."""
    found: dict[tuple[str, bool], int] = {}
    for node in names:
        kind = phases.get(node, "")
        key = (kind, bool(kind) and kind != current.get(node))
        found[key] = found.get(key, 0) + 1
    return [
        {"name": f"{n} nodes", "short": formats.exact(n), "kind": kind, "changed": changed, "grow": n}
        for (kind, changed), n in sorted(found.items(), key=lambda pair: (pair[0][0] != "prefill", pair[0]))
    ]


def _no_mark(name: str, title: str, note: str) -> dict[str, Any]:
    return {"id": name, "title": title, "text": "–", "note": note, "cells": []}


def _force(force: Json) -> dict[str, Any]:
    phases = force["phases"]
    split: dict[str, list[str]] = {
        phase: [n for n, p in phases.items() if p == phase] for phase in ("prefill", "decode", "mixed")
    }
    return {
        "node": force["node"],
        "what": f"{force['node']} to {phases[force['node']]}" if force["node"] else f"split {label(split)}",
        "reason": force["reason"],
        "by": force["forced_by"],
        "at": _unix(force["created_at"]),
        "expires": _unix(force["expires_at"]),
    }


# -- decision --------------------------------------------------------------------------------------------------------


def shown_detail(detail: Json) -> dict[str, Any]:
    """What the page shows of a decision's detail, whose candidates are as many as there are splits."""
    candidates = detail.get("candidates", [])
    return {
        "candidates": sorted(candidates, key=_by_gain, reverse=True)[:CANDIDATES_SHOWN],
        "candidates_total": len(candidates),
        "rules": detail.get("rules", []),
        "window": detail.get("window", [])[-SLICES_SHOWN:],
    }


def _decision(decision: Json) -> dict[str, Any]:
    candidates = sorted(decision["candidates"], key=_by_gain, reverse=True)
    scale = _Scale([candidate.get("gate") or {} for candidate in candidates[:CANDIDATES_SHOWN]])
    chosen = decision["chosen"]
    shown = [_candidate(candidate, chosen, scale) for candidate in candidates[:CANDIDATES_SHOWN]]
    return {
        "id": decision["id"],
        "at": _unix(decision["at"]),
        "verdict": decision["verdict"],
        "rule": decision["rule"],
        "reason": decision["reason"],
        "source": decision["source"],
        "theta": _per_s(decision["theta"]),
        "slices": f"{decision['slices_used']} of {decision['slices']} slices measured",
        "candidates": shown,
        "more": max(0, decision.get("candidates_total", len(candidates)) - len(shown)),
        "zero": scale.place(0.0),
        "rules": [{"text": text, "ok": code == "ok", "reason": reason} for text, code, reason in decision["rules"]],
        "window": [_slice(piece) for piece in decision["window"][-SLICES_SHOWN:]],
    }


def _gain(candidate: Json) -> float | None:
    return (candidate.get("gate") or {}).get("gain")


def _by_gain(candidate: Json) -> float:
    gain = _gain(candidate)
    return float("-inf") if gain is None else gain


class _Scale:
    """Requests per second to places on the strip, wide enough for every shown gain, its error and its threshold."""

    def __init__(self, gates: Sequence[Json]) -> None:
        points = [0.0]
        for gate in gates:
            if gate.get("gain") is not None:
                error = gate.get("standard_error") or 0.0
                points += [gate["gain"] - error, gate["gain"] + error, gate.get("threshold") or 0.0]
        margin = (max(points) - min(points)) * 0.06 or 1.0
        self.low, self.high = min(points) - margin, max(points) + margin

    def place(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{min(1.0, max(0.0, (value - self.low) / (self.high - self.low))) * 100:.1f}%"

    def bar(self, gate: Json) -> dict[str, str]:
        """The gain as an interval of one standard error to each side, beside its threshold."""
        gain, error = gate["gain"], gate.get("standard_error") or 0.0
        low, high = self.place(gain - error), self.place(gain + error)
        return {"gain": self.place(gain), "low": low, "high": high, "threshold": self.place(gate.get("threshold"))}


def _candidate(candidate: Json, chosen: Json | None, scale: _Scale) -> dict[str, Any]:
    gate = candidate.get("gate") or {}
    gain, error, threshold = gate.get("gain"), gate.get("standard_error"), gate.get("threshold")
    prefill, decode = list(candidate["prefill"]), list(candidate["decode"])
    taken = bool(chosen) and list(chosen["prefill"]) == prefill and list(chosen["decode"]) == decode  # type: ignore[index]
    bar = scale.bar(gate) if gain is not None else None
    return {
        "label": label(candidate),
        "moves": _moves({move["node"]: move["to_phase"] for move in candidate["moves"]}) or "no move",
        "theta": _per_s(candidate.get("theta")),
        "gain": _signed(gain) if gain is not None else "not measured",
        "error": f"± {error:.3f}" if error is not None else "",
        "threshold": _signed(threshold) if threshold is not None else formats.UNKNOWN,
        "passed": bool(gate.get("passed")),
        "taken": taken,
        "bar": bar,
        "bottleneck": candidate.get("bottleneck") or formats.UNKNOWN,
        "wait": formats.duration(candidate.get("prefill_wait_p95_s")),
        # The gate's sentence begins with the numbers that the other columns show.
        "reason": (candidate.get("reason") or "").rpartition("): ")[2],
        "outside_fit": bool(candidate.get("outside_fit")),
    }


def _moves(phases: Mapping[str, str]) -> str:
    """Who goes where: "gb300-5, gb300-6 to prefill"."""
    to: dict[str, list[str]] = {}
    for node, phase in phases.items():
        to.setdefault(phase, []).append(node)
    return "; ".join(f"{', '.join(nodes)} to {phase}" for phase, nodes in to.items())


def _slice(piece: Json) -> dict[str, Any]:
    load = piece.get("workload") or {}
    return {
        "t0": piece["t0"],
        "measured": bool(load),
        "rate": _per_s(piece.get("rate")),
        "computed": formats.count(load.get("t_uc")),
        "restored": formats.count(load.get("t_rst")),
        "output": formats.count(load.get("t_out")),
        "in_flight": formats.UNKNOWN if load.get("in_flight") is None else f"{load['in_flight']:.1f}",
        "prefill": formats.percent(piece.get("prefill_utilisation")),
        "decode": formats.percent(piece.get("decode_utilisation")),
        "wait": formats.duration(piece.get("prefill_wait_p95_s")),
        "stale": formats.percent(piece.get("stale_ratio")),
    }


def _fit(fit: Json) -> dict[str, Any]:
    return {
        "hardware_class": fit["hardware_class"],
        "state": fit["state"],
        "prefill_error": formats.percent(fit["prefill_error_ratio"], 1),
        "decode_error": formats.percent(fit["decode_error_ratio"], 1),
        "rows": f"{formats.exact(fit['prefill_rows'])} prefill, {formats.exact(fit['decode_rows'])} decode",
        "warnings": fit["warnings"],
    }


# -- proposals and orders --------------------------------------------------------------------------------------------


def _proposal(proposal: Json) -> dict[str, Any]:
    gain, error, threshold = proposal["gain"], proposal["standard_error"], proposal["threshold"]
    was = dict.fromkeys(proposal["from_prefill"], "prefill") | dict.fromkeys(proposal["from_decode"], "decode")
    will = dict.fromkeys(proposal["prefill"], "prefill") | dict.fromkeys(proposal["decode"], "decode")
    scale = _Scale([proposal])
    return {
        "id": proposal["id"],
        "from": f"{len(proposal['from_prefill'])}P{len(proposal['from_decode'])}D",
        "to": label(proposal),
        "moves": _moves({node: phase for node, phase in will.items() if was.get(node) != phase}),
        "nodes": _node_by_node(was, will),
        "bar": None if gain is None else scale.bar(proposal) | {"zero": scale.place(0.0)},
        "passed": gain is not None and threshold is not None and gain > threshold,
        "gain": "" if gain is None else f"{_signed(gain)} ± {error or 0:.3f} req/s",
        "threshold": "" if threshold is None else f"{_signed(threshold)} req/s",
        "reason": proposal["reason"],
        "by": _by(proposal),
        "at": _unix(proposal["created_at"]),
        "expires": _unix(proposal["expires_at"]),
        "needs": formats.plural(proposal["approvals_required"], "approval"),
        "votes": [{**vote, "at": _unix(vote["at"])} for vote in proposal["votes"]],
        "dry_run": dry_run(proposal["dry_run"]) if proposal.get("dry_run") else None,
    }


def _by(proposal: Mapping[str, Any]) -> str:
    """Who proposed it; of a key also whose it is."""
    by, person = str(proposal["proposed_by"]), proposal.get("proposer")
    return f"{person} ({by})" if person and person != by else by


def _node_by_node(was: Mapping[str, str], will: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each node does now and would do; in large partitions only those that would change."""
    names = list(dict.fromkeys([*was, *will]))
    if len(names) > CELLS_SHOWN:
        names = [name for name in names if was.get(name) != will.get(name)][:CELLS_SHOWN]
    return [
        {"name": name, "was": was.get(name, ""), "will": will.get(name, ""), "changed": was.get(name) != will.get(name)}
        for name in sorted(names, key=_natural)
    ]


def _natural(name: str) -> tuple[str, int, str]:
    """gb300-2 before gb300-10."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail), "") if tail.isdecimal() else (name, 0, "")


_FIGURES = (
    ("throughput_rps", "Throughput", lambda value: f"{value:.3f}/s", True),
    ("ttft_mean_s", "Mean TTFT", formats.duration, False),
    ("ttft_p95_s", "TTFT p95", formats.duration, False),
    ("e2e_mean_s", "Mean E2E", formats.duration, False),
    ("e2e_p95_s", "E2E p95", formats.duration, False),
    ("kv_hit_pct", "Reused", lambda value: f"{value:.1f} %", True),
)


def dry_run(run: Json) -> dict[str, Any]:
    """A split tried in the simulator: each figure now and then, and which way it goes."""
    result = run["result"] or {}
    now, then = result.get("current") or {}, result.get("candidate") or {}
    rows = []
    for name, title, form, more_is_better in _FIGURES:
        was, will = now.get(name), then.get(name)
        if was is None or will is None:
            continue
        change = will / was - 1 if was else None
        better = change is not None and abs(change) >= 0.005 and (change > 0) == more_is_better
        worse = change is not None and abs(change) >= 0.005 and not better
        rows.append(
            {
                "title": title,
                "now": form(was),
                "then": form(will),
                "change": formats.signed_percent(change),
                "tone": "fine" if better else "bad" if worse else "muted",
            }
        )
    return {
        "id": run["id"],
        "state": run["state"],
        "tone": {"done": "fine", "failed": "bad"}.get(run["state"], "warn"),
        "split": f"{len(run['prefill'])}P{len(run['decode'])}D",
        "prefill": list(run["prefill"]),
        "proposal": run["proposal"],
        "by": run["asked_by"],
        "at": _unix(run["asked_at"]),
        "problem": run["problem"],
        "rows": rows,
        "basis": f"{formats.exact(result['agents'])} agents for {formats.duration(result.get('scored_s'))} of simulated time"
        if result.get("agents")
        else "",
    }


def _order(order: Json, now: float) -> dict[str, Any]:
    state = OrderState(order["state"])
    began, switched, finished = (_unix(order[name]) for name in ("ordered_at", "switched_at", "finished_at"))
    end = switched or finished
    tone = {"done": "fine", "cooling": "fine", "failed": "bad", "rolled-back": ""}.get(state.value, "warn")
    return {
        "id": order["id"],
        "state": state.value,
        "state_label": "Turning back" if order["undoing"] and state.value in ("draining", "switching") else state.label,
        "tone": tone,
        "cause": Cause(order["cause"]).label,
        "by": order["ordered_by"],
        "reason": order["reason"],
        "outcome": order["outcome"],
        "from": label(order["from"]),
        "to": label(order["to"]),
        "rolls_back": order["rolls_back"],
        "at": began,
        "took": formats.duration(end - began) if end and began else formats.UNKNOWN,
        "since": formats.duration(max(0.0, now - began)) if began and not end else "",
        "cooling_until": _unix(order["cooling_until"]) if state == OrderState.COOLING else None,
        "can_roll_back": order["can_roll_back"],
        "steps": [_step(step, now) for step in order["steps"]],
    }


def _step(step: Json, now: float) -> dict[str, Any]:
    began, finished = _unix(step["began_at"]), _unix(step["finished_at"])
    state = StepState(step["state"])
    running = state in (StepState.DRAINING, StepState.SWITCHING)
    return {
        "node": step["node"],
        "from": step["from_phase"],
        "to": step["to_phase"],
        "state": state.value,
        "state_label": state.label,
        "kind": state.value if running else step["to_phase"] if state == StepState.SWITCHED else step["from_phase"],
        "tone": {"switched": "fine", "failed": "bad"}.get(state.value, "warn" if running else ""),
        "generation": step["generation"],
        "at": began,
        "took": formats.duration((finished or now) - began) if began and (finished or running) else formats.UNKNOWN,
        "reason": step["reason"],
    }


def _unix(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment else None


def _per_s(value: float | None) -> str:
    return formats.UNKNOWN if value is None else f"{value:.3f}/s"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
