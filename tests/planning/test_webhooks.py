"""What happens to the split is told to channels that want it, with the change itself or not at all."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from apps.flowcontrol import services as flowcontrol
from apps.planning import services
from apps.planning.models import PlannerPolicy, Proposal, SwitchOrder
from apps.telemetry import webhooks
from apps.telemetry.models import Delivery
from controlplane.actors import PLANNER, SYSTEM
from tests.factories import actor_with, make_partition

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition(db):
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve")
    for kind in ("*", "proposal", "config"):
        name = "all" if kind == "*" else kind
        webhooks.create_channel(name, "http://127.0.0.1:9/", actor_with("administrator"), kinds=[kind])
    return partition


def told(channel, kind):
    return [d.body["data"] for d in Delivery.objects.filter(channel__name=channel, kind=kind).order_by("id")]


def propose(partition):
    return services.propose(partition, 3, PLANNER, "more prompts", timezone.now() + timedelta(minutes=5))


def test_a_proposal_and_the_switch_it_leads_to_are_told(partition):
    proposal = propose(partition)
    services.approve(proposal, actor_with("operator"))
    order = SwitchOrder.objects.get()
    assert [data["state"] for data in told("all", "proposal")] == ["open", "approved"]
    assert told("all", "proposal") == told("proposal", "proposal")
    switch = told("all", "switch")[0]
    assert (switch["partition"], switch["order"], switch["state"]) == ("gb300", order.pk, "ordered")
    assert told("proposal", "switch") == []


def test_what_was_taken_back_is_not_told(partition):
    Delivery.objects.all().delete()
    with transaction.atomic():
        propose(partition)
        transaction.set_rollback(True)
    assert not Proposal.objects.exists()
    assert not Delivery.objects.exists()


def test_a_published_configuration_is_told_once(partition):
    Delivery.objects.all().delete()
    flowcontrol.create_band(partition, "spare", -50, SYSTEM, "for the night")
    (config,) = told("config", "config")
    assert (config["partition"], config["reason"]) == ("gb300", "for the night")


def test_every_kind_is_described(partition):
    text = (Path(settings.BASE_DIR) / "docs" / "webhooks.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(webhooks.KINDS)
