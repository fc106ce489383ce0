"""The partition that planning is tested on."""

import pytest

from apps.planning.models import PlannerPolicy
from tests.factories import make_partition


@pytest.fixture
def partition():
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve", cooldown_s=30)
    return partition
