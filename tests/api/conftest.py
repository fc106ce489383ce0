"""One described partition, its users and keys, and a client that speaks JSON to the REST API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import transaction
from django.test import Client
from django.utils import timezone

from apps.flowcontrol import services as flowcontrol
from apps.planning import experiments, orders, services
from apps.planning.domain.phase_machine import StatusReported, Tick
from apps.planning.models import Decision, DryRun, FittedModel, PlannerPolicy, Slice, SwitchOrder
from apps.telemetry import webhooks
from apps.telemetry.models import Alert, RequestRecord
from apps.tenancy import services as tenancy
from apps.tenancy.models import Tenant
from apps.topology import services as topology
from apps.topology.configuration import latest
from apps.topology.models import Node, Partition
from controlplane.actors import PLANNER, SYSTEM
from tests.factories import actor_with, make_partition, make_tenant, make_user

LIVE = {"v": 1, "partition": "gb300", "t": 7.5, "config_version": 3, "bands": [{"name": "premium", "waiting": 2}]}

WORKLOAD = {"t_uc": 900, "pairs": 4e7, "t_rst": 0, "t_out": 200, "t_acc": 2.2, "u_tokens": 8192, "in_flight": 20}


@pytest.fixture
def partition(db: None) -> Partition:
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve")
    flowcontrol.create_band(partition, "spare", -50, SYSTEM)
    make_tenant()
    make_user("admin")
    Slice.objects.create(partition=partition, t0=0.0, t1=60.0, workload=WORKLOAD)
    RequestRecord.objects.create(partition=partition, request_id="r-1", at=timezone.now(), tenant="acme")
    return partition


@pytest.fixture
def live(redis_client: redis.Redis, partition: Partition) -> dict[str, Any]:
    """The gateway's snapshot, as Redis has it."""
    snapshot = {**LIVE, "stages": {"prefill": {"saturation": 0.5}}}
    redis_client.set("switchyard:gb300:live", json.dumps(snapshot))
    return snapshot


@pytest.fixture
def key_of(partition: Partition) -> Callable[[str], str]:
    """The text of a new API key with a role (blank: inference only), of a person who has it too."""
    tenant = Tenant.objects.get(name="acme")

    def issued(role: str) -> str:
        name = f"{role or 'plain'}-key"
        return tenancy.issue_key(
            tenant, name, SYSTEM, role=role, owner=make_user(f"who-has-{name}", role).username if role else None
        ).plain_text

    return issued


@pytest.fixture
def address(partition: Partition) -> Callable[[str], str]:
    """An address of `operations.py` with the rows made that it speaks of."""

    def made(path: str) -> str:
        for what, make in _MADE.items():
            if f"{{{what}}}" in path:
                path = path.replace(f"{{{what}}}", str(make(partition)))
        return path

    return made


@pytest.fixture
def plain() -> Callable[[str], str]:
    """The address with a number in each place, for refusals that come before any row is looked for."""
    return lambda path: re.sub(r"\{\w+\}", "1", path)


@pytest.fixture
def undone(db: None) -> Callable[[], AbstractContextManager[None]]:
    """`with undone():` what is written inside is taken back, so that one partition serves many calls."""

    @contextmanager
    def undone() -> Iterator[None]:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)

    return undone


def _key(partition: Partition) -> int:
    return tenancy.issue_key(Tenant.objects.get(name="acme"), "spare", SYSTEM).key.pk


def _channel(partition: Partition) -> str:
    return webhooks.create_channel("pager", "http://127.0.0.1:9/", SYSTEM).channel.name


def _unused(partition: Partition) -> str:
    """A node out of service."""
    return topology.disable_node(Node.objects.get(name="gb300-4"), SYSTEM).name


def _idle(partition: Partition) -> str:
    """An experiment that may be asked for: none is under way."""
    for each in experiments.experiments():
        if each.is_open:
            experiments.cancel(each.name, SYSTEM)
    return "bands"


def _busy(partition: Partition) -> str:
    """An experiment that was asked for."""
    experiments.job("fairness").ask({"asked_by": "robin", "quick": True})
    return "fairness"


def _member(partition: Partition) -> str:
    tenancy.add_member(Tenant.objects.get(name="acme"), make_user("member", "tenant"), SYSTEM)
    return "member"


def _alert(partition: Partition) -> int:
    return Alert.objects.create(
        partition=partition, rule="node-down", severity="critical", state="firing", summary="gb300-1 does not answer"
    ).pk


def _proposal(partition: Partition) -> int:
    later = timezone.now() + timedelta(minutes=5)
    return services.propose(partition, 3, PLANNER, "more prompts", later).pk


def _order(partition: Partition) -> int:
    """A switch that is done."""
    services.approve(services.Proposal.objects.get(pk=_proposal(partition)), actor_with("operator"))
    order, now = SwitchOrder.objects.get(), timezone.now().timestamp()
    for _ in range(3):
        orders.advance(order.pk, now, Tick())
        for step in order.steps.all():
            orders.advance(
                order.pk, now, StatusReported(step.node, step.to_phase, step.to_phase, "ready", step.generation)
            )
    return order.pk


def _version(partition: Partition) -> int:
    found = latest(partition)
    assert found is not None
    return found.version


def _decision(partition: Partition) -> int:
    made = {"verdict": "hold", "rule": "no_gain", "reason": "none is better", "source": "configured", "mode": "approve"}
    return Decision.objects.create(
        partition=partition, window_start=0, window_end=600, slices=10, slices_used=10, **made
    ).pk


def _fit(partition: Partition) -> int:
    return FittedModel.objects.create(
        partition=partition,
        hardware_class="gb300",
        state="retired",
        prefill={"c0": 0.05, "c1": 4e-5, "c2": 2e-10, "c3": 6e-7},
        decode={"d0": 2e-3, "d1": 0.02, "d2": 4e-4},
        prefill_rows=40,
        decode_rows=40,
        prefill_error_ratio=0.02,
        decode_error_ratio=0.02,
        batch_low=1,
        batch_high=64,
        residuals={"prefill": [["gb300-1", 5.0, 1.0, 1.02, True]], "decode": []},
    ).pk


def _dry_run(partition: Partition) -> int:
    return DryRun.objects.create(partition=partition, prefill=["gb300-1"], decode=["gb300-2"], asked_by="robin").pk


_MADE: dict[str, Callable[[Partition], int | str]] = {
    "unused": _unused,
    "key": _key,
    "channel": _channel,
    "member": _member,
    "idle": _idle,
    "busy": _busy,
    "proposal": _proposal,
    "alert": _alert,
    "order": _order,
    "version": _version,
    "decision": _decision,
    "fit": _fit,
    "dry_run": _dry_run,
}


class Rest:
    """Calls as the holder of a role, by session (`role=""`: nobody) or by `key`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = {role: make_user(role, role) for role in ("viewer", "operator", "administrator", "tenant")}

    def log_in(self, role: str) -> None:
        """Anew at each call, so that it also holds after `undone`."""
        if role:
            self.client.force_login(self.users[role])
        else:
            self.client.logout()

    def answer(
        self, method: str, path: str, body: Any = None, role: str = "administrator", key: str = "", **headers: str
    ) -> Any:
        """`headers` are written with `_` for `-`; a body that is text is sent as it is."""
        self.log_in("" if key else role)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        arguments: dict[str, Any] = {}
        if body is not None:
            data = body if isinstance(body, str | bytes) else json.dumps(body)
            arguments = {"data": data, "content_type": "application/json"}
        return self.client.generic(method.upper(), f"/api/v1{path}", headers=sent, **arguments)

    def __call__(self, method: str, path: str, body: Any = None, **more: str) -> tuple[int, Any]:
        """Status and body, read by what it says it is: JSON, or text (YAML)."""
        answer = self.answer(method, path, body, **more)
        if not answer.content:
            return answer.status_code, None
        json_told = answer["Content-Type"].split(";")[0].endswith("json")
        return answer.status_code, json.loads(answer.content) if json_told else answer.content.decode()


@pytest.fixture
def rest(client: Client, partition: Partition) -> Rest:
    client.raise_request_exception = False
    return Rest(client)


def is_problem(answer: Any) -> bool:
    """Whether an error is told as RFC 9457 says, with all of the product's own members."""
    body = json.loads(answer.content)
    members = {"type", "title", "status", "detail", "code", "instance", "request_id", "errors"}
    return (
        answer["Content-Type"] == "application/problem+json"
        and body.keys() == members
        and body["status"] == answer.status_code
        and body["type"] == f"urn:switchyard:problem:{body['code']}"
        and bool(body["detail"])
    )
