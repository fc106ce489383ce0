"""How often each page asks the database: a known number, the same with few and with many nodes, tenants and years."""

import json
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from apps.flowcontrol.models import Band
from apps.planning.models import Decision, DryRun, FittedModel, ForcedSplit, Proposal, SwitchOrder, SwitchStep
from apps.telemetry import gateways
from apps.telemetry.models import Alert, AlertSetting, Channel, Delivery, LiveSample, RequestRecord, RequestSum
from apps.tenancy.models import ApiKey, Tenant
from apps.topology.models import ConfigurationVersion, Node
from bench.console_gateway import answers
from controlplane import redis_client as keys
from tests.console.kit import band, candidate, node, snapshot
from tests.factories import COEFFICIENTS

# Where more switched than the timeline's table lists, it asks for those of its lanes. Audit asks twice a table it shows.
QUERIES = {
    "overview": 12, "queues": 14, "split": 21, "nodes": 16, "requests": 14, "branches": 12, "reuse": 11, "model": 12,
    "whatif": 11, "tenants": 13, "alerts": 14, "audit": 25, "settings": 16, "period": 7, "split-state": 19, "timeline": 9,
    "node-list": 7, "waiting": 7, "flows": 5, "alerts-state": 9, "history": 6, "palette": 8,
}  # fmt: skip


def fill(partition, size):
    """`size` of everything; the smallest is enough for every part of every page to have something to show."""
    now = timezone.now()
    at = [now - timedelta(hours=i) for i in range(size)]
    names = [node.name for node in partition.nodes.all()]
    Node.objects.bulk_create(
        Node(partition=partition, name=f"more-{i}", order=10 + i, url=f"http://127.0.0.1:9/{i}", engine="simulated",
             hardware_class="gb300", coefficients=COEFFICIENTS, decode_limit=8, desired_phase="decode", enabled=i != 1)
        for i in range(size)
    )  # fmt: skip
    tenants = Tenant.objects.bulk_create(Tenant(name=f"t-{i}", sharing_domain=f"t-{i}") for i in range(size))
    ApiKey.objects.bulk_create(
        ApiKey(tenant=tenant, name="k", prefix="sy_", sha256=f"{tenant.pk:064}", objectives=["*"]) for tenant in tenants
    )
    RequestRecord.objects.bulk_create(
        RequestRecord(
            partition=partition, request_id=f"r-{i}", at=now, tenant=f"t-{i}", band="standard", outcome="completed"
        )
        for i in range(size)
    )
    RequestSum.objects.bulk_create(
        RequestSum(partition=partition, slot_s=60, t0=int(now.timestamp() // 60) * 60 - 60 * i, tenants={},
                   data={"outcomes": {"completed": 1}, "bands": {}})
        for i in range(size)
    )  # fmt: skip
    LiveSample.objects.bulk_create(
        LiveSample(partition=partition, t=now.timestamp() - i, data={"t": now.timestamp() - i}) for i in range(size)
    )
    split = {"from_prefill": names[:2], "from_decode": names[2:]}
    orders = SwitchOrder.objects.bulk_create(
        SwitchOrder(partition=partition, cause="planner", ordered_by="p", reason="r", state="done" if i else "draining",
                    to_prefill=names[:1], to_decode=names[1:], drain_deadline_s=1, cooldown_s=1, ordered_at=at[i], **split)
        for i in range(size)
    )  # fmt: skip
    SwitchStep.objects.bulk_create(
        SwitchStep(order=order, position=n, node=name, from_phase="prefill", to_phase="decode", state="switched",
                   began_at=now - timedelta(minutes=2), finished_at=now - timedelta(minutes=1))
        for order in orders
        for n, name in enumerate(names)
    )  # fmt: skip
    ahead = {"expires_at": now + timedelta(hours=1), "proposed_by": "p", "reason": "r"}
    proposal = Proposal.objects.create(partition=partition, prefill=names[:3], decode=names[3:], **split, **ahead)
    for i in range(size):
        proposal.votes.create(actor=f"person-{i}", person=f"person-{i}", choice="approve")
    DryRun.objects.bulk_create(
        DryRun(partition=partition, state="done", prefill=names, decode=[], asked_by="p", asked_at=at[i], result={},
               proposal=proposal)
        for i in range(size)
    )  # fmt: skip
    ForcedSplit.objects.bulk_create(
        ForcedSplit(partition=partition, node=f"more-{i}", phases={f"more-{i}": "decode"}, reason="r", forced_by="p")
        for i in range(size)
    )
    candidates = [candidate(names[:1], names[1:], 0.1, 0.2, 0.3, "no_gain") for _ in range(size)]
    Decision.objects.bulk_create(
        Decision(partition=partition, window_start=60 * i, window_end=60 * i + 60, verdict="hold", rule="no_gain", reason="r",
                 source="learned", mode="approve", slices=1, slices_used=1, detail={"candidates": candidates})
        for i in range(size)
    )  # fmt: skip
    FittedModel.objects.bulk_create(
        FittedModel(partition=partition, hardware_class=f"c-{i}", state="accepted", prefill={}, decode={}, prefill_rows=1,
                    decode_rows=1, prefill_error_ratio=0.1, decode_error_ratio=0.1, batch_low=1, batch_high=2)
        for i in range(size)
    )  # fmt: skip
    Alert.objects.bulk_create(
        Alert(partition=partition, rule="queue-old", subject=f"{state}-{i}", severity="warning", state=state, summary="s",
              since=at[i], resolved_at=now if state == "resolved" else None)
        for state in ("firing", "pending", "resolved")
        for i in range(size)
    )  # fmt: skip
    AlertSetting.objects.bulk_create(AlertSetting(partition=partition, rule=f"rule-{i}") for i in range(size))
    channels = Channel.objects.bulk_create(
        Channel(name=f"c-{i}", url="http://127.0.0.1:9/", secret="s") for i in range(size)
    )
    Delivery.objects.bulk_create(Delivery(channel=c, event_id="e", kind="alert", body={}) for c in channels)
    ConfigurationVersion.objects.bulk_create(
        ConfigurationVersion(partition=partition, version=1000 + i, document={}, author="p") for i in range(size)
    )
    for i in range(size):
        Band.objects.filter(partition=partition).update(max_requests=10 + i)


@pytest.fixture
def gateway(monkeypatch):
    """A gateway with as many branches and waiting requests as are asked for."""
    found = answers(100, 30)

    def call(partition, method, path, params=None):
        if path == "reuse":
            return found["reuse"][0]
        rows = found[path][: (params or {}).get("limit", 100)]
        return {"total": 2000, "waiting": 2000, "live": 400, "block_tokens": 64, "rows": rows, "closed": []}

    monkeypatch.setattr(gateways, "_call", call)


def counted(client, redis_client, partition, size):
    fill(partition, size)
    flows = [{"id": f"t-{i}", "waiting": 1, "oldest_s": 1.0, "dispatched_total": 1} for i in range(size)]
    shown = [node(name) for name in partition.nodes.values_list("name", flat=True)]
    bands = [band("standard", 0, 4, flows=flows), band("premium", 100, flows=flows)]
    data = json.dumps(snapshot(nodes=shown, bands=bands))
    found = {}
    for name in QUERIES:
        redis_client.set(keys.live_key(partition.name), data, ex=10)
        client.get(reverse(name, args=[partition.name]))  # what is read once a process is read now
        with CaptureQueriesContext(connection) as asked:
            answer = client.get(reverse(name, args=[partition.name]))
        assert answer.status_code == 200, name
        found[name] = len(asked)
    return found


@pytest.mark.parametrize(("size", "role"), [(3, "viewer"), (130, "viewer"), (130, "administrator")])
def test_the_number_of_queries_of_a_page_is_known_and_does_not_grow(
    as_role, redis_client, partition, gateway, size, role
):
    found = counted(as_role(role), redis_client, partition, size)
    assert {name: n for name, n in found.items() if n > QUERIES[name]} == {}
