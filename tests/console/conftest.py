"""A published partition of four nodes, its policy, people of every role, and a gateway's snapshot."""

import pytest

from apps.planning.models import PlannerPolicy
from tests.console.kit import node, publish_snapshot, snapshot
from tests.factories import make_partition, make_tenant, make_user

ROLES = ("viewer", "operator", "administrator", "tenant")


@pytest.fixture
def partition(db, redis_client):
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve", slo_ttft_s=1.0, cooldown_s=30)
    make_tenant("acme", title="Acme")
    return partition


@pytest.fixture
def live(partition, redis_client):
    nodes = [node(f"gb300-{i}", "prefill" if i < 3 else "decode") for i in (1, 2, 3, 4)]
    return publish_snapshot(redis_client, snapshot(nodes=nodes))


@pytest.fixture
def as_role(client):
    """The test client, signed in as someone with a role; asked again, as someone else."""
    people = {}

    def sign_in(role):
        people.setdefault(role, None)
        if people[role] is None:
            people[role] = make_user(f"{role}-person", role)
        client.force_login(people[role])
        return client

    return sign_in
