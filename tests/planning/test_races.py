"""Two people, or a person and the planner, at the same moment: each outcome is one that some order of the two would give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from apps.planning import orders, services
from apps.planning.choices import Cause
from apps.planning.models import ForcedSplit, SwitchOrder, Vote
from controlplane import records
from controlplane.actors import PLANNER
from controlplane.errors import Conflict
from tests.factories import actor_with
from tests.planning.test_services import finish, proposed

pytestmark = pytest.mark.django_db(transaction=True)
ADA = actor_with("administrator", "ada")
BOB = actor_with("operator", "bob")


class Doing(threading.Thread):
    """A call on a connection of its own; `result` is what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.result = call, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.result = error
        finally:
            connection.close()

    def outcome(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "it waits for ever"
        return self.result


def at_once(*calls):
    return [thread.outcome() for thread in [Doing(call) for call in calls]]


def conflicts(results):
    return sorted(result.code for result in results if isinstance(result, Conflict))


def test_two_approvals_at_once_order_one_switch(partition):
    proposal = proposed(partition)
    results = at_once(lambda: services.approve(proposal, ADA), lambda: services.approve(proposal, BOB))
    assert conflicts(results) == ["proposal-closed"]
    assert (SwitchOrder.objects.count(), Vote.objects.count()) == (1, 1)


def test_one_person_approving_twice_at_once_has_one_vote(partition):
    services.update_policy(partition, ADA, approvals_required=2)
    proposal = proposed(partition)
    results = at_once(*[lambda: services.approve(proposal, BOB)] * 2)
    assert conflicts(results) == ["already-voted"]
    assert (SwitchOrder.objects.count(), Vote.objects.count()) == (0, 1)


def test_two_roll_backs_at_once_undo_once(partition):
    services.approve(proposed(partition), BOB)
    order = finish(SwitchOrder.objects.get())
    results = at_once(*[lambda: services.roll_back(order, BOB, "worse")] * 2)
    assert conflicts(results) == ["switch-running"]
    assert SwitchOrder.objects.filter(rolls_back=order).count() == 1


def test_two_forces_at_once_leave_one_order_and_the_newer_force(partition):
    results = at_once(
        lambda: services.force_split(partition, 1, ADA, "one"), lambda: services.force_split(partition, 3, ADA, "three")
    )
    assert not [result for result in results if isinstance(result, Exception)]
    assert (ForcedSplit.objects.filter(cleared_at=None).count(), SwitchOrder.objects.count()) == (1, 1)


def test_a_freeze_waits_for_the_planner_s_tick_so_that_nothing_is_ordered_after_it(partition):
    with transaction.atomic():
        records.locked(partition)  # as the tick does, before it reads the mode
        freeze = Doing(lambda: services.freeze(partition, ADA, "release", None))
        freeze.join(0.5)
        assert freeze.is_alive(), "frozen, and the tick would order a switch still"
        orders.place(partition, {"gb300-3": "prefill"}, Cause.PLANNER, PLANNER, "more prompts")
    assert freeze.outcome().mode == "frozen"
    assert finish(SwitchOrder.objects.get()).state == "cooling", "what was ordered before ends as ordered"


def test_edits_of_a_policy_by_page_and_by_rest_do_not_wait_for_each_other_crosswise(partition):
    with transaction.atomic():
        records.locked(partition)  # as REST does first
        page = Doing(lambda: services.update_policy(partition, ADA, slo_ttft_s=3.0))
        page.join(0.5)
        services.update_policy(partition, ADA, slo_ttft_s=2.0)
    assert page.outcome().slo_ttft_s == 3.0


def test_a_force_cleared_meanwhile_is_not_ordered(partition):
    ForcedSplit.objects.create(
        partition=partition, node="gb300-2", phases={"gb300-2": "decode"}, reason="x", forced_by="ada"
    )
    with transaction.atomic():
        records.locked(partition)
        applied = Doing(lambda: services.apply_forces(partition))
        applied.join(0.5)
        services.clear_force(partition, ADA, "not after all")
    assert applied.outcome() is None
    assert not SwitchOrder.objects.exists()
