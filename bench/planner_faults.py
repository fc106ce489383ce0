"""`make proof-planner`: Redis or PostgreSQL is away for half a minute in the middle of a switch, on a whole running product.

Four outages: each of the two servers frozen (connections hang) and killed (connections are refused; the supervisor is kept
from restarting it for the time). While recorded sessions are replayed a node is forced to its other phase, and the outage
begins at once. The gateway must go on answering, and afterwards the split must be as ordered or as before, with no node in
between. First the same with nothing away, twice, to either phase: silences that the work itself brings (long prompts queueing on
the one prefill node that is left) are the baseline of the others. `python -m bench.planner_faults [OUTAGE_S]`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.report import report
from tools.smoke import Operator, SmokeFailed, running_yard, say

PARTITION, NODE = "gb300", "gb300-2"
OUTAGE_S = 30.0
SETTLE_WITHIN_S = 90.0
# What a client may have to wait between two answers of a gateway that serves twelve agents on four nodes.
LONGEST_SILENCE_S = 12.0
NOTHING = "nothing"
SERVERS = {"redis": ("valkey-server", "redis-server"), "postgresql": ("postgres",)}
_ENDED = re.compile(r'^switchyard_requests_ended_total\{[^}]*outcome="completed"[^}]*\} ([0-9.e+]+)', re.MULTILINE)


def children(root: int) -> dict[int, str]:
    """Every process below `root` with its command line."""
    parents: dict[int, list[int]] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name)
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(number)
            lines[number] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found[child] = lines.get(child, "")
            waiting.append(child)
    return found


def processes_of(server: str) -> list[int]:
    """The server's processes under this one; the supervisor's helpers that only carry its name as an argument are left out."""
    found = []
    for number in children(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{number}/comm").read_text().strip() in SERVERS[server]:
                found.append(number)
    if not found:
        raise SmokeFailed(f"no process of {server} was found")
    return found


def supervisor() -> int:
    return next(number for number, line in children(os.getpid()).items() if " manage.py up " in line)


@contextlib.contextmanager
def away(server: str, how: str) -> Iterator[None]:
    """The server does not answer inside: `frozen`, or `killed` and not restarted. Nothing happens to `nothing`."""
    if server == NOTHING:
        yield
        return
    stopped = processes_of(server) if how == "frozen" else [supervisor()]
    for number in stopped:
        os.kill(number, signal.SIGSTOP)
    if how == "killed":
        for number in processes_of(server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    try:
        yield
    finally:
        for number in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)


class Gateway:
    """Counts answers by the gateway's own metrics, which need neither server."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address.removesuffix("/v1"), timeout=10, trust_env=False)

    def completed(self) -> float:
        return sum(float(number) for number in _ENDED.findall(self._client.get("/metrics").text))

    def watch(self, seconds: float) -> tuple[float, float]:
        """Answers given in that time, and the longest silence between two of them."""
        began = last_at = time.monotonic()
        first = last = self.completed()
        silence_s = 0.0
        while time.monotonic() - began < seconds:
            time.sleep(0.25)
            now = self.completed()
            if now > last:
                silence_s = max(silence_s, time.monotonic() - last_at)
                last, last_at = now, time.monotonic()
        return last - first, max(silence_s, time.monotonic() - last_at)


def settled(operator: Operator) -> dict[str, Any] | None:
    """The split when no order moves, no node drains, and every node is what it should be; else None."""
    try:
        split = operator.call("GET", f"/split/{PARTITION}")
    except (SmokeFailed, httpx.HTTPError):
        return None
    if any(order["state"] in ("ordered", "draining", "switching") for order in split["active_orders"]):
        return None
    good = all(
        node["observed_phase"] == node["desired_phase"] and node["observed_state"] == "ready" and not node["draining"]
        for node in split["current"]["nodes"]
    )
    return dict(split) if good else None


def until_settled(operator: Operator) -> tuple[dict[str, Any] | None, float]:
    began = time.monotonic()
    while time.monotonic() - began < SETTLE_WITHIN_S:
        split = settled(operator)
        if split is not None:
            return split, time.monotonic() - began
        time.sleep(0.5)
    return None, time.monotonic() - began


def outage(
    operator: Operator, gateway: Gateway, server: str, how: str, seconds: float, quiet_s: float | None = None
) -> float:
    """One outage in the middle of a switch of one node; answers the longest silence. `quiet_s`: that with nothing away."""
    name = f"outage.{server}.{how}"
    before, _ = until_settled(operator)
    if before is None:
        raise SmokeFailed("the split did not settle before the outage")
    phase = next(node["desired_phase"] for node in before["current"]["nodes"] if node["name"] == NODE)
    wanted = "decode" if phase == "prefill" else "prefill"
    operator.call("PUT", f"/nodes/{NODE}/phase", {"phase": wanted, "reason": f"{server} {how}", "expires_in_s": 3600})
    with away(server, how):
        say(f"{server} is {how}, {NODE} is ordered from {phase} to {wanted}")
        answered, silence_s = gateway.watch(seconds)
    split, took_s = until_settled(operator)
    report(f"{name}.answers_during", answered, "requests", target=1.0)
    target = None if server == NOTHING else LONGEST_SILENCE_S
    report(f"{name}.longest_silence", silence_s, "s", target=target, aim="at_most", baseline=quiet_s)
    report(f"{name}.settled_after", took_s if split else None, "s", target=SETTLE_WITHIN_S, aim="at_most")
    now = next((n["desired_phase"] for n in split["current"]["nodes"] if n["name"] == NODE), None) if split else None
    report(f"{name}.split_as_ordered", float(now == wanted), "splits", target=None if now == phase else 1.0)
    after, _ = gateway.watch(LONGEST_SILENCE_S)
    report(f"{name}.answers_after", after, "requests", target=1.0)
    return silence_s


def main(seconds: float) -> int:
    """All four outages on one run."""
    password = secrets.token_urlsafe(12)
    clusters = Path(__file__).with_suffix(".yaml")
    with (
        tempfile.TemporaryDirectory(prefix="switchyard-proof-") as folder,
        running_yard(Path(folder), password, "--clusters", str(clusters), ready_timeout_s=600) as where,
    ):
        operator, gateway = Operator(where["console"], password), Gateway(where["gateways"][PARTITION])
        deadline = time.monotonic() + 120
        while gateway.completed() < 5 and time.monotonic() < deadline:
            time.sleep(0.5)
        quiet_s = max(outage(operator, gateway, NOTHING, how, seconds) for how in ("first", "second"))
        for server in SERVERS:
            for how in ("frozen", "killed"):
                outage(operator, gateway, server, how, seconds, quiet_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else OUTAGE_S))
