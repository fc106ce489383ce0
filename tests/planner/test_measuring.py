"""What the tick takes from the gateway's records: pauses of agents, and how long a switching node is away."""

from datetime import UTC, datetime

import pytest

from apps.planning import windows
from apps.planning.models import SwitchOrder, SwitchStep
from apps.telemetry.models import RequestRecord
from tests.planner.telemetry import START, make_watched_partition

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition(redis_client):
    return make_watched_partition()


def moment(seconds):
    return datetime.fromtimestamp(seconds, UTC)


def answered(partition, branch, at, e2e_s=2.0):
    RequestRecord.objects.create(
        partition=partition, request_id=f"{branch}-{at}", branch=branch, at=moment(at), e2e_s=e2e_s
    )


def test_a_pause_lies_between_an_answer_and_the_next_question_of_the_same_branch(partition):
    answered(partition, "a", START)
    answered(partition, "b", START + 1)
    answered(partition, "a", START + 17)
    answered(partition, "", START + 18)
    assert windows.thinks(partition, START, START + 60) == [(START + 17, 15.0)]


def test_the_answer_before_may_lie_before_the_slice_but_not_too_long(partition):
    answered(partition, "a", START - 100)
    answered(partition, "a", START + 10)
    answered(partition, "b", START - 1000)
    answered(partition, "b", START + 12)
    assert windows.thinks(partition, START, START + 60) == [(START + 10, 108.0)]


def test_questions_asked_before_the_answer_are_no_pauses(partition):
    answered(partition, "a", START)
    answered(partition, "a", START + 1, e2e_s=5.0)
    assert windows.thinks(partition, START, START + 60) == []


def test_a_drained_node_that_was_long_away_makes_the_next_switch_cost_that(partition):
    assert {node.switch_s for node in windows.planner_state(partition, START).nodes} == {0.0}
    split = {"from_prefill": [], "from_decode": [], "to_prefill": [], "to_decode": []}
    order = SwitchOrder.objects.create(
        partition=partition, cause="force", ordered_by="ada", reason="r", state="done", drain_deadline_s=60,
        cooldown_s=60, **split,
    )  # fmt: skip
    for index, away_s in enumerate((700.0, 720.0)):
        SwitchStep.objects.create(
            order=order, position=index, node=f"gb300-{index + 1}", from_phase="prefill", to_phase="decode",
            state="switched", began_at=moment(START), drained_at=moment(START + 20),
            finished_at=moment(START + 20 + away_s),
        )  # fmt: skip
    assert {node.switch_s for node in windows.planner_state(partition, START).nodes} == {710.0}
