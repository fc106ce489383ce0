"""What beat starts, and how often. A message that waited longer than its interval is dropped: the next one does its work."""

from __future__ import annotations

from typing import Any

TICK_EVERY_S = 2.0
RECONCILE_EVERY_S = 5.0
PRUNE_EVERY_S = 3600.0
WATCH_EVERY_S = 5.0


def _every(seconds: float, task: str, module: str = "tasks") -> dict[str, Any]:
    return {"task": f"workers.planner.{module}.{task}", "schedule": seconds, "options": {"expires": seconds}}


BEAT_SCHEDULE = {
    "tick": _every(TICK_EVERY_S, "tick_all"),
    "reconcile": _every(RECONCILE_EVERY_S, "reconcile_all"),
    "prune": _every(PRUNE_EVERY_S, "prune_all"),
    "watch": _every(WATCH_EVERY_S, "watch_all", "alerts"),
}
