"""`switchyard split ...` and `switchyard simulate`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from controlplane.cli.api_types import DryRunOut, ForceIn, FreezeIn, Mode, OrderOut, SplitOut
from controlplane.cli.call import Call, Result
from controlplane.cli.client import CliError, pages
from controlplane.cli.tables import ago, facts, shown, split, table

MOVING = ("ordered", "draining", "switching")
POLL_S = 1.0


def nodes_wanted(text: str) -> int | list[str]:
    """`3` or `gb300-1,gb300-2`."""
    return int(text) if text.isdigit() else [name for name in text.split(",") if name]


def show(call: Call) -> Result:
    found = call.api.get_split(call.partition)
    return Result(found, _split_text(found))


def _split_text(found: SplitOut) -> str:
    policy, decision, proposal = found["policy"], found["last_decision"], found["open_proposal"]
    frozen = f", frozen by {policy['frozen_by']}: {policy['freeze_reason']}" if policy["mode"] == "frozen" else ""
    lines = {
        "current": split(cast(Any, found["current"])),
        "proposed": split(cast(Any, found["proposed"])),
        "forced": "; ".join(f"{_force(f)}, by {f['forced_by']}: {f['reason']}" for f in found["forced"]["forces"])
        if found["forced"]
        else None,
        "mode": policy["mode"] + frozen,
    }
    if decision:
        lines["decision"] = f"{decision['id']}, {ago(decision['at'])}: {decision['verdict']} ({decision['rule']})"
        lines["because"] = decision["reason"]
    if proposal:
        gain = _gain(proposal["gain"], proposal["standard_error"], proposal["threshold"])
        lines["proposal"] = f"{proposal['id']} by {proposal['proposed_by']}, ends {ago(proposal['expires_at'])}: {gain}"
    for order in found["active_orders"]:
        lines[f"switch {order['id']}"] = f"{order['state']}: {order['reason']}"
    rows = [
        (n["name"], n["desired_phase"], n["observed_phase"], n["observed_state"], n["draining"], ago(n["observed_at"]))
        for n in found["current"]["nodes"]
    ]
    columns = ("node", "desired", "observed", "state", "draining", "heard")
    return facts(lines) + "\n\n" + table(columns, rows)


def _force(force: Any) -> str:
    """One node and its phase, or a whole split."""
    phases = force["phases"]
    if force["node"]:
        return ", ".join(f"{node} {phase}" for node, phase in phases.items())
    return split({wanted: [n for n, p in phases.items() if p == wanted] for wanted in ("prefill", "decode", "mixed")})


def _gain(gain: float | None, error: float | None, threshold: float | None) -> str:
    if gain is None:
        return "gain not measured"
    return f"gain {gain:+.3f} ± {error or 0:.3f} req/s, must exceed {shown(threshold)}"


def propose(call: Call) -> Result:
    until = datetime.now(UTC) + timedelta(seconds=call.args.expires_in)
    wanted = nodes_wanted(call.args.prefill)
    made = call.api.propose_split(
        call.partition, {"prefill_nodes": wanted, "reason": call.reason, "expires_at": until.isoformat()}
    )
    return Result(made, f"proposal {made['id']}: {split(cast(Any, made))}, open until {made['expires_at']}")


def _open_proposal(call: Call) -> int:
    if call.args.number is not None:
        return int(call.args.number)
    proposal = call.api.get_split(call.partition)["open_proposal"]
    if proposal is None:
        raise CliError("there is no open proposal")
    return proposal["id"]


def approve(call: Call) -> Result:
    number = _open_proposal(call)
    call.confirm(f"Approve proposal {number} of {call.partition}", str(number))
    found = call.api.approve_proposal(call.partition, number, {"reason": call.reason})
    return Result(found, f"proposal {number} is {found['state']}")


def reject(call: Call) -> Result:
    number = _open_proposal(call)
    found = call.api.reject_proposal(call.partition, number, {"reason": call.reason})
    return Result(found, f"proposal {number} is {found['state']}")


def force(call: Call) -> Result:
    wanted = nodes_wanted(call.args.prefill)
    call.confirm(f"Force {call.args.prefill} to prefill in {call.partition}, the rest to decode", call.partition)
    body: ForceIn = {"prefill_nodes": wanted, "reason": call.reason}
    if call.args.expires_in is not None:
        body["expires_in_s"] = call.args.expires_in
    found = call.api.force_split(call.partition, body)
    return Result(found, _split_text(found))


def unforce(call: Call) -> Result:
    found = call.api.clear_force(call.partition, reason=call.reason)
    return Result(found, "no force any more; the split stays as it is")


def freeze(call: Call) -> Result:
    call.confirm(f"Freeze the split of {call.partition}", call.partition)
    body: FreezeIn = {"reason": call.reason}
    if call.args.expires_in is not None:
        body["until"] = (datetime.now(UTC) + timedelta(seconds=call.args.expires_in)).isoformat()
    found = call.api.freeze_split(call.partition, body)
    return Result(found, f"frozen until {found['frozen_until'] or 'someone unfreezes it'}")


def unfreeze(call: Call) -> Result:
    found = call.api.unfreeze_split(call.partition, reason=call.reason)
    return Result(found, f"mode {found['mode']}")


def mode(call: Call) -> Result:
    found = call.api.set_mode(call.partition, {"mode": cast(Mode, call.args.mode), "reason": call.reason})
    return Result(found, f"mode {found['mode']}")


def rollback(call: Call) -> Result:
    number = call.args.number
    if number is None:
        last = next((o for o in pages(call.api.list_orders, call.partition, most=20) if o["can_roll_back"]), None)
        if last is None:
            raise CliError("no switch can be rolled back")
        number = last["id"]
    call.confirm(f"Roll back switch {number} of {call.partition}", str(number))
    made = call.api.roll_back_order(call.partition, number, {"reason": call.reason})
    return Result(made, f"order {made['id']}: {split(made['from'])} to {split(made['to'])}, {made['state']}")


def history(call: Call) -> Result:
    found: list[OrderOut] = list(pages(call.api.list_orders, call.partition, most=call.args.limit))
    rows = [
        (o["id"], ago(o["ordered_at"]), split(cast(Any, o["from"])), split(cast(Any, o["to"])), o["state"], o["cause"],
         o["ordered_by"], o["outcome"] or o["reason"])
        for o in found
    ]  # fmt: skip
    return Result(found, table(("order", "when", "from", "to", "state", "cause", "by", "why"), rows, "no switch yet"))


def decisions(call: Call) -> Result:
    found = list(pages(call.api.list_decisions, call.partition, most=call.args.limit))
    rows = [(d["id"], ago(d["at"]), d["verdict"], d["rule"], d["gain"], d["threshold"], d["reason"]) for d in found]
    return Result(found, table(("decision", "when", "verdict", "rule", "gain", "threshold", "reason"), rows))


def wait(call: Call) -> Result:
    """Until no switch moves a node; exit status 1 when one failed meanwhile or it takes too long."""
    left, seen = call.args.timeout, set()
    while True:
        moving = [o for o in call.api.get_split(call.partition)["active_orders"] if o["state"] in MOVING]
        seen |= {order["id"] for order in moving}
        if not moving:
            break
        if left <= 0:
            raise CliError(f"switch {moving[0]['id']} is still {moving[0]['state']}")
        call.wait(POLL_S)
        left -= POLL_S
    ended = [call.api.get_order(call.partition, number) for number in sorted(seen)]
    bad = [order for order in ended if order["state"] in ("failed", "rolled-back")]
    text = "\n".join(f"switch {o['id']} is {o['state']}: {o['outcome'] or o['reason']}" for o in ended)
    return Result(ended, text or "no switch is under way", 1 if bad else 0)


def simulate(call: Call) -> Result:
    """Tries a split in the simulator from the live state, and waits for the answer."""
    asked = call.api.ask_dry_run(
        call.partition, {"prefill_nodes": nodes_wanted(call.args.prefill), "reason": call.reason}
    )
    left = call.args.timeout
    run: DryRunOut = asked
    while run["state"] not in ("done", "failed"):
        if left <= 0:
            raise CliError(f"dry run {run['id']} is still {run['state']}; see it later with its number")
        call.wait(POLL_S)
        left -= POLL_S
        run = call.api.get_dry_run(call.partition, asked["id"])
    if run["state"] == "failed":
        return Result(run, f"dry run {run['id']} failed: {run['problem']}", 1)
    result = run["result"] or {}
    now, then = result.get("current") or {}, result.get("candidate") or {}
    rows = [(name, value, then[name]) for name, value in now.items() if isinstance(value, int | float) and name in then]
    return Result(run, table(("figure", "now", split(cast(Any, run))), rows))
