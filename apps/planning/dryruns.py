"""Dry runs: a split tried in the simulator from the live state, before anybody switches a node.

This module asks for one and stores what came of it; a worker simulates (`workers/planner/simulating.py`). The result goes
with the proposal that it was made for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from apps.planning import orders
from apps.planning.choices import DryRunState
from apps.planning.models import DryRun, Proposal, Slice
from apps.planning.selectors import desired_split, policy_of
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane import records
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict

logger = logging.getLogger(__name__)
DRY_RUN_TASK = "workers.planner.tasks.dry_run"
# One at a time of a partition, and none for ever: a worker that died leaves its run to this age.
OVERDUE_S = 300.0


def ask(partition: Partition, prefill_nodes: int | Sequence[str], actor: Actor, reason: str = "") -> DryRun:
    """Try a split in the simulator from the live state. Operator.

    Raises InvalidField for unknown nodes, Conflict when a phase would be left without a node, while another dry run of
    the partition is under way, or when nothing has been measured yet.
    """
    with change(actor, reason or "dry run", role="operator"):
        partition = records.locked(partition)
        nodes = list(nodes_of(partition))
        targets = orders.split_targets(nodes, prefill_nodes)
        orders.check_targets({node.name: node for node in nodes}, targets)
        fail_overdue(partition)
        if DryRun.objects.filter(partition=partition, state__in=(DryRunState.WAITING, DryRunState.RUNNING)).exists():
            raise Conflict("another dry run is under way; wait for its result", "dry-run-running")
        if recent_slices(partition) == []:
            raise Conflict("nothing has been measured yet: the live state is empty", "nothing-measured")
        split = desired_split(nodes, targets)
        return _create(partition, split["prefill"], split["decode"], str(actor), None)


def ask_for(proposal: Proposal) -> DryRun | None:
    """Try what a proposal proposes; the result is shown with it. None while nothing is measured. Call within `change`."""
    if not recent_slices(proposal.partition):
        return None
    return _create(proposal.partition, proposal.prefill, proposal.decode, proposal.proposed_by, proposal)


def begin(run: DryRun) -> bool:
    """A worker takes the run; False when another has."""
    return bool(DryRun.objects.filter(pk=run.pk, state=DryRunState.WAITING).update(state=DryRunState.RUNNING))


def finish(run: DryRun, result: dict[str, Any]) -> None:
    """Store what the simulator found, and tell the partition's browsers."""
    _close(run, DryRunState.DONE, result=result)


def fail(run: DryRun, problem: str) -> None:
    """The run came to nothing; `problem` says why in words for people."""
    _close(run, DryRunState.FAILED, problem=problem[:500])


def fail_overdue(partition: Partition) -> None:
    """Runs whose worker has died."""
    before = datetime.fromtimestamp(timezone.now().timestamp() - OVERDUE_S, UTC)
    DryRun.objects.filter(
        partition=partition, state__in=(DryRunState.WAITING, DryRunState.RUNNING), asked_at__lt=before
    ).update(state=DryRunState.FAILED, finished_at=timezone.now(), problem=f"no result within {OVERDUE_S:.0f} s")


def recent_slices(partition: Partition) -> list[Slice]:
    """The newest window's slices that measured a workload, oldest first: what a dry run replays."""
    count = policy_of(partition).slices_per_window
    rows = Slice.objects.filter(partition=partition).exclude(workload=None).order_by("-t0")[:count]
    return list(reversed(rows))


def _create(
    partition: Partition, prefill: Sequence[str], decode: Sequence[str], asked_by: str, proposal: Proposal | None
) -> DryRun:
    run = DryRun.objects.create(
        partition=partition, prefill=list(prefill), decode=list(decode), asked_by=asked_by, proposal=proposal
    )
    transaction.on_commit(lambda: _send(run.pk))
    return run


def _send(number: int) -> None:
    from controlplane.celery import app

    try:
        app.send_task(DRY_RUN_TASK, args=[number], ignore_result=True, retry=False)
    except Exception as error:  # the broker's client has no common base class for "away"
        logger.warning("dry run %s is not sent: the broker is away (%s)", number, error)


def _close(run: DryRun, state: DryRunState, **values: Any) -> None:
    with transaction.atomic():
        open_states = (DryRunState.WAITING, DryRunState.RUNNING)
        DryRun.objects.filter(pk=run.pk, state__in=open_states).update(
            state=state, finished_at=timezone.now(), **values
        )
        orders.tell(
            run.partition.name, "proposal", dry_run=run.pk, proposal=run.proposal_id, state=state.value, reason=""
        )
