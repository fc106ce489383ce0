"""`switchyard experiments ...`: what was measured in the simulator, and asking for more."""

from __future__ import annotations

from typing import Any

from controlplane.cli.call import Call, Result
from controlplane.cli.client import CliError
from controlplane.cli.tables import ago, facts, table

OPEN = ("waiting", "running")
POLL_S = 2.0


def listed(call: Call) -> Result:
    found = call.api.list_experiments()
    rows = [(each["name"], each["title"], ago(each["measured_at"]), _job(each["job"])) for each in found]
    return Result(found, table(("experiment", "what", "measured", "job"), rows))


def _job(job: Any) -> str:
    if job is None:
        return ""
    told = f"{job['state']} {job['progress']:.0%} {job['step']}" if job["state"] in OPEN else job["state"]
    return " ".join(f"{told} {job['problem']}".split())


def show(call: Call) -> Result:
    found = call.api.get_experiment(call.args.name)
    lines: dict[str, Any] = {
        found["name"]: found["title"], "measured": ago(found["measured_at"]), "job": _job(found["job"]),
    }  # fmt: skip
    if found["problem"]:
        lines["problem"] = found["problem"]
    text = facts(lines)
    report = found["report"]
    if report is None:
        return Result(found, f"{text}\n\nnot run yet; `switchyard experiments start {found['name']}` asks for it")
    verdicts = [
        (v["text"], v["value"], f"{'>=' if v['aim'] == 'at_least' else '<='} {v['target']:g}",
         {True: "met", False: "missed", None: "not run"}[v["met"]])
        for v in report["verdicts"]
    ]  # fmt: skip
    if verdicts:
        text += "\n\n" + table(("demanded", "found", "target", ""), verdicts)
    rows = [
        (f["case"], f"{f['figure']} ({f['unit']})" if f["unit"] else f["figure"], f["value"], f["spread"],
         f["published"], f["ratio"], f["seeds"])
        for f in report["found"] if f["seeds"]
    ]  # fmt: skip
    text += "\n\n" + table(("case", "figure", "ours", "spread", "published", "ratio", "seeds"), rows)
    return Result(found, "\n".join([text, "", *report["notes"]]).rstrip())


def start(call: Call) -> Result:
    found = call.api.start_experiment(call.args.name, {"quick": not call.args.full, "reason": call.reason})
    return Result(found, f"{found['name']} is asked for; follow it with `switchyard experiments wait {found['name']}`")


def cancel(call: Call) -> Result:
    found = call.api.cancel_experiment(call.args.name, {"reason": call.reason})
    return Result(found, f"{found['name']} stops after the run that is being made")


def wait(call: Call) -> Result:
    """Until it is not under way any more; exit status 1 unless it is done."""
    left = call.args.timeout
    while True:
        found = call.api.get_experiment(call.args.name)
        job = found["job"]
        if job is None:
            raise CliError(f"nobody asked for {call.args.name}")
        if job["state"] not in OPEN:
            return Result(found, f"{found['name']} is {_job(job)}", 0 if job["state"] == "done" else 1)
        if left <= 0:
            raise CliError(f"{found['name']} is still {_job(job)}")
        call.wait(POLL_S)
        left -= POLL_S
