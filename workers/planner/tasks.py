"""The planner's Celery tasks. Each is short, may run twice, and leaves a partition to whoever holds its lock already."""

from __future__ import annotations

import logging
import time
from typing import Any

import redis

from apps.planning import dryruns, orders, services, windows
from apps.planning.choices import OrderState
from apps.planning.domain.phase_machine import ACTIVE, Tick
from apps.planning.models import DryRun, SwitchOrder
from apps.planning.selectors import desired_split
from apps.telemetry import services as telemetry
from apps.topology import configuration
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane.celery import app
from controlplane.errors import SwitchyardError
from workers.planner import driving
from workers.planner.health import heal, observe
from workers.planner.ingest import read_stream
from workers.planner.live_state import NothingToSimulate, live_state
from workers.planner.locks import partition_lock
from workers.planner.reach import live
from workers.planner.schedule import BEAT_SCHEDULE, PRUNE_EVERY_S, RECONCILE_EVERY_S, TICK_EVERY_S
from workers.planner.simulating import compare
from workers.yard.config import ConfigError

logger = logging.getLogger(__name__)
# Here and not beside the application: web processes use that too, and know no worker.
app.conf.beat_schedule = BEAT_SCHEDULE
# Shorter than the broker's visibility timeout; a longer switch goes on in a new task.
DRIVE_BUDGET_S = 6.0


@app.task
def tick_all() -> None:
    _fan_out(tick, TICK_EVERY_S)


@app.task
def reconcile_all() -> None:
    _fan_out(reconcile, RECONCILE_EVERY_S)


@app.task
def prune_all() -> None:
    _fan_out(prune, PRUNE_EVERY_S)


def _fan_out(task: Any, expires_s: float) -> None:
    for name in Partition.objects.order_by("name").values_list("name", flat=True):
        task.apply_async(args=[name], expires=expires_s)


@app.task
def ingest(partition_name: str) -> int:
    """Store what is new on a partition's telemetry stream, exactly once; returns how many rows."""
    partition = _partition(partition_name)
    if partition is None:
        return 0
    try:
        stored = read_stream(partition)
    except (redis.RedisError, OSError) as error:
        logger.warning("%s: telemetry waits, Redis is away (%s)", partition_name, type(error).__name__)
        return 0
    return sum(batch.requests + batch.cost_windows + batch.load_windows for batch in stored)


@app.task
def tick(partition_name: str, now: float | None = None) -> str:
    """Close slices, watch the last switch, and decide when a window has ended; says what it came to.

    `now` (unix seconds) is for tests.
    """
    partition = _partition(partition_name)
    if partition is None:
        return "unknown partition"
    with partition_lock("plan", partition.pk) as mine:
        if not mine:
            return "another worker plans"
        ingest(partition_name)
        moment = time.time() if now is None else now
        return windows.tick(partition, moment, live(partition))


@app.task
def drive_switch(order_id: int, budget_s: float = DRIVE_BUDGET_S) -> str:
    """Drive one order; returns its state. A second driver of the same partition leaves at once."""
    order = SwitchOrder.objects.select_related("partition").filter(pk=order_id).first()
    if order is None:
        return "unknown order"
    with partition_lock("drive", order.partition_id) as mine:
        if not mine:
            return "another worker drives"
        state = driving.drive(order, budget_s)
    if state in ACTIVE:
        orders.start_driving(order)
    else:
        _order_what_is_forced(order.partition)
    return state


def _order_what_is_forced(partition: Partition) -> bool:
    """Whether something was ordered. A force that cannot be carried out now is left for the next try, and says why."""
    try:
        return services.apply_forces(partition) is not None
    except SwitchyardError as error:
        logger.warning("%s: the forced split cannot be ordered: %s", partition.name, error.message)
        return False


@app.task
def dry_run(number: int) -> str:
    """Simulate the split of a dry run beside the present one; says what came of it."""
    run = DryRun.objects.select_related("partition").filter(pk=number).first()
    if run is None or not dryruns.begin(run):
        return "unknown, or another worker simulates it"
    try:
        state = live_state(run.partition)
        current = desired_split(nodes_of(run.partition))["prefill"]
        dryruns.finish(run, compare(state, current, run.prefill))
    except (NothingToSimulate, ConfigError) as problem:
        dryruns.fail(run, str(problem))
        return f"failed: {problem}"
    except Exception:
        dryruns.fail(run, "the simulation broke off; the planner's log has the details")
        raise
    return "done"


@app.task
def reconcile(partition_name: str, now: float | None = None) -> str:
    """Finish what a crash left, end what has expired, heal what has drifted; says what it did. `now` is for tests."""
    partition = _partition(partition_name)
    if partition is None:
        return "unknown partition"
    with partition_lock("reconcile", partition.pk) as mine:
        if not mine:
            return "another worker reconciles"
        moment = time.time() if now is None else now
        did = []
        services.expire(partition)
        dryruns.fail_overdue(partition)
        reports = observe(partition, moment)
        did += heal(partition, reports)
        did += _resume_orders(partition, moment)
        if _order_what_is_forced(partition):
            did.append("ordered what is forced")
        try:
            if configuration.republish(partition):
                did.append("sent the configuration again")
        except (redis.RedisError, OSError) as error:
            logger.warning("%s: Redis is away (%s)", partition_name, type(error).__name__)
        return ", ".join(did) or "nothing to do"


def _resume_orders(partition: Partition, now: float) -> list[str]:
    did = []
    for order in SwitchOrder.objects.filter(partition=partition, state=OrderState.COOLING):
        state, _ = orders.advance(order.pk, now, Tick())
        if state != OrderState.COOLING:
            did.append(f"order {order.pk} is {state}")
    moving = orders.moving_order(partition)
    if moving is not None:
        with partition_lock("drive", partition.pk) as undriven:
            pass
        if undriven:
            orders.start_driving(moving)
            did.append(f"resumed order {moving.pk}")
    return did


@app.task
def prune(partition_name: str) -> int:
    """Delete telemetry and slices past their age; returns how many telemetry rows."""
    partition = _partition(partition_name)
    if partition is None:
        return 0
    with partition_lock("prune", partition.pk) as mine:
        if not mine:
            return 0
        windows.prune(partition, time.time())
        return telemetry.prune(partition)


def _partition(name: str) -> Partition | None:
    return Partition.objects.filter(name=name).first()
