"""What lies behind the pages that `bench.console` asks for: 768 nodes, 50 tenants, and 30 days of everything."""

from __future__ import annotations

import json
import random
import secrets
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

PARTITION = "bench"
NODES = 768
TENANTS = 50
FLOWS = 200
DAYS = 30
SAMPLE_EVERY_S = 15
RECORDS = 300_000
RECORD_DAYS = 7
ORDERS = 3_000
MOVES = 8
EDITS = 30_000
NODE_EDITS = 20
FITS = 40


def seed(gateway_url: str) -> str:
    """Fills the database; returns the session key of a viewer."""
    from django.conf import settings
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from django.contrib.auth.models import Group, User
    from django.contrib.sessions.backends.db import SessionStore
    from django.db import connection

    from apps.planning.models import PlannerPolicy
    from apps.tenancy.models import ApiKey, Tenant
    from apps.topology.configuration import publish
    from apps.topology.models import Node, Partition
    from controlplane.actors import SYSTEM
    from tests.factories import COEFFICIENTS, make_partition

    settings.ALLOWED_HOSTS.append("testserver")
    partition = make_partition(PARTITION, ())
    Partition.objects.filter(pk=partition.pk).update(gateway_url=gateway_url)
    Node.objects.bulk_create(
        Node(
            partition=partition, name=_name(i), order=i, url=f"http://127.0.0.1:9/nodes/{i}", engine="simulated",
            hardware_class="gb300", coefficients=COEFFICIENTS, decode_limit=128, desired_phase=_phase(i),
        )
        for i in range(NODES)
    )  # fmt: skip
    PlannerPolicy.objects.create(partition=partition, slo_ttft_s=5.0)
    tenants = Tenant.objects.bulk_create(
        Tenant(name=f"tenant-{i}", sharing_domain=f"tenant-{i}") for i in range(TENANTS)
    )
    ApiKey.objects.bulk_create(
        ApiKey(tenant=tenant, name=f"key-{n}", prefix="sy_bench", sha256=secrets.token_hex(32), objectives=["*"])
        for tenant in tenants
        for n in range(3)
    )
    publish(partition, SYSTEM, "made for a benchmark")
    _samples(partition)
    _requests(partition)
    _sums(partition)
    _planning(partition)
    _orders(partition)
    _operations(partition)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    user = User.objects.create_user("viewer")
    user.groups.set([Group.objects.get_or_create(name="viewer")[0]])
    store = SessionStore()
    store[SESSION_KEY], store[BACKEND_SESSION_KEY] = str(user.pk), settings.AUTHENTICATION_BACKENDS[0]
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.create()
    return str(store.session_key)


def _name(i: int) -> str:
    return f"{PARTITION}-{i % NODES}"


def _phase(i: int) -> str:
    return "prefill" if i % 2 else "decode"


def _split(prefill: int) -> tuple[list[str], list[str]]:
    return [_name(i) for i in range(prefill)], [_name(i) for i in range(prefill, NODES)]


def _at(i: int, of: int) -> datetime:
    """The time of the i-th of `of` things spread over all the days."""
    return datetime.now(UTC) - timedelta(days=DAYS) * (1 - i / of)


def _samples(partition: Any) -> None:
    from django.db import connection

    from apps.telemetry.models import LoadWindow
    from apps.telemetry.samples import point_of

    now = time.time()
    LoadWindow.objects.bulk_create(
        (LoadWindow(partition=partition, t0=now - 2 * i - 2, t1=now - 2 * i) for i in range(5000)), batch_size=1000
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO telemetry_livesample (partition_id, t, data) SELECT %s, t, "
            "jsonb_set(%s::jsonb, '{t}', to_jsonb(t)) FROM generate_series(%s::numeric, %s::numeric, %s::numeric) AS t",
            [partition.pk, json.dumps(point_of(snapshot(9, 3, 0))), now - DAYS * 86_400, now, SAMPLE_EVERY_S],
        )


def _requests(partition: Any) -> None:
    """Records as long as they are kept, most of them in the last hours, a few of them of rare kinds."""
    from django.db import connection

    from apps.telemetry.models import RequestRecord

    detail = {"router_terms": [{"node": f"n{i}", "total_s": 1.0} for i in range(32)], "story": []}
    record = RequestRecord.objects.create(
        partition=partition, request_id="req", at=_at(0, 1), tenant="tenant-0", band="standard", branch="tenant-0/b1",
        prefill_node=_name(1), decode_node=_name(2), prompt_tokens=50_000, cached_tokens=45_000, output_tokens=300,
        queue_s=0.1, ttft_s=0.5, predicted_ttft_s=0.45, e2e_s=4.0, outcome="completed", reason="least predicted TTFT",
        detail=detail,
    )  # fmt: skip
    columns = [str(f.column) for f in RequestRecord._meta.concrete_fields if not f.primary_key]
    own = {
        "request_id": "'req-' || i",
        "at": "to_timestamp(%(now)s - %(span)s * power(1 - i / %(n)s::float, 3))",
        "tenant": "'tenant-' || (i %% %(tenants)s)",
        "branch": "'tenant-' || (i %% %(tenants)s) || '/b' || (i %% 9973)",
        "prefill_node": "'bench-' || (i * 7 %% %(nodes)s)",
        "decode_node": "'bench-' || (i * 11 %% %(nodes)s)",
        "outcome": "CASE WHEN i %% 10007 = 0 THEN 'failed' WHEN i %% 53 = 0 THEN 'dropped' ELSE 'completed' END",
    }
    values = ", ".join(own.get(column, f'"{column}"') for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO telemetry_requestrecord ({names}) SELECT {values} FROM telemetry_requestrecord, "  # noqa: S608
            "generate_series(1, %(n)s) AS i WHERE id = %(id)s",
            {"span": RECORD_DAYS * 86_400, "now": time.time(), "n": RECORDS, "tenants": TENANTS, "nodes": NODES,
             "id": record.pk},
        )  # fmt: skip


def _sums(partition: Any) -> None:
    """Every slot that is kept, each as full as two thousand requests make it."""
    from apps.telemetry import periods
    from apps.telemetry.models import RequestSum

    draw, now = random.Random(1), time.time()
    sums, tenants = periods.Sums(), {f"tenant-{i}": periods.TenantSums() for i in range(TENANTS)}
    for i in range(2000):
        ttft_s = draw.lognormvariate(0, 1)
        request = {
            "outcome": "completed", "band": draw.choice(("premium", "standard", "free")), "ttft_s": ttft_s,
             "queue_s": draw.lognormvariate(-2, 1), "predicted_ttft_s": ttft_s * draw.lognormvariate(0, 0.2),
             "e2e_s": ttft_s + draw.lognormvariate(2, 1), "prompt_tokens": 50_000, "cached_tokens": 45_000,
             "computed_tokens": 5000, "output_tokens": 300, "lost": {"evicted": 64, "routed": 3},
        }  # fmt: skip
        sums.count(request)
        tenants[f"tenant-{i % TENANTS}"].count(request)
    columns = {"data": sums.as_dict(), "tenants": {name: asdict(each) for name, each in tenants.items()}}
    RequestSum.objects.bulk_create(
        (
            RequestSum(partition=partition, slot_s=slot_s, t0=int(now // slot_s) * slot_s - i * slot_s, **columns)
            for slot_s, kept_s in periods.SLOTS.items()
            for i in range(int(kept_s // slot_s))
        ),
        batch_size=100,
    )  # fmt: skip


def _planning(partition: Any) -> None:
    """The last decision over as many candidates as there are splits, an open proposal, fits and dry runs."""
    from apps.planning.models import Decision, DryRun, FittedModel, Proposal
    from tests.console.kit import candidate

    current, now = _split(NODES // 2), datetime.now(UTC)
    candidates = [
        candidate(
            *_split(n), 0.1 * (n % 7), 0.2, 0.3, "gain-below-threshold", [(_name(n), "prefill", "decode")] * MOVES
        )
        for n in range(1, NODES)
    ]
    workload = {"t_uc": 5e3, "t_rst": 4e4, "t_out": 300, "in_flight": 900.0}
    window = [{"t0": time.time() - 60 * i, "workload": workload, "rate": 20.0} for i in range(10)]
    for i in range(6):
        Decision.objects.create(
            partition=partition, window_start=600 * i, window_end=600 * i + 600, verdict="hold", rule="gain-below-threshold", mode="approve",
            reason="no split gains enough", source="learned", current_prefill=current[0], current_decode=current[1],
            slices=10, slices_used=10, detail={"candidates": candidates, "rules": [["a", "ok", ""]] * 9, "window": window},
            at=now - timedelta(minutes=10 * (6 - i)),
        )  # fmt: skip
    proposal = Proposal.objects.create(
        partition=partition, prefill=_split(400)[0], decode=_split(400)[1], from_prefill=current[0], gain=1.0,
        from_decode=current[1], reason="r", proposed_by="planner", expires_at=now + timedelta(hours=1),
    )  # fmt: skip
    figures = {"throughput_rps": 20.0, "ttft_mean_s": 1.0, "ttft_p95_s": 2.0, "e2e_mean_s": 9.0}
    DryRun.objects.bulk_create(
        DryRun(
            partition=partition, state="done", prefill=current[0], decode=current[1], asked_by="someone", asked_at=_at(i, 300),
            proposal=proposal if i > 297 else None, result={"current": figures, "candidate": figures, "agents": 900},
        )
        for i in range(300)
    )  # fmt: skip
    rows = [[_name(i), float(i), 0.5, 0.51, False] for i in range(240)]
    part = {"rows": 5000, "error_ratio": 0.05, "columns": {"c1": {"low": 1.0, "high": 9.0}}}
    FittedModel.objects.bulk_create(
        FittedModel(
            partition=partition, hardware_class="gb300", state="accepted" if i == FITS - 1 else "retired",
            prefill={"c0": 0.05, "c1": 4e-5}, decode={"d0": 0.1}, prefill_rows=5000, decode_rows=5000,
            prefill_error_ratio=0.05, decode_error_ratio=0.05, batch_low=1, batch_high=64, created_at=_at(i, FITS),
            summary={"nodes": [_name(n) for n in range(NODES)], "windows": 9000, "prefill": part, "decode": part},
            residuals={"prefill": rows, "decode": rows},
        )
        for i in range(FITS)
    )  # fmt: skip


def _orders(partition: Any) -> None:
    """Switches of several nodes each, the last one still under way."""
    from apps.planning.models import SwitchOrder, SwitchStep

    before, after = _split(NODES // 2), _split(NODES // 2 + MOVES)
    orders = SwitchOrder.objects.bulk_create(
        (
            SwitchOrder(
                partition=partition, cause="planner", ordered_by="planner", reason="r", from_prefill=before[0],
                from_decode=before[1], to_prefill=after[0], to_decode=after[1], drain_deadline_s=60, cooldown_s=60,
                state="done" if i < ORDERS - 1 else "draining", ordered_at=_at(i, ORDERS),
                switched_at=_at(i, ORDERS) if i < ORDERS - 1 else None,
                finished_at=_at(i, ORDERS) if i < ORDERS - 1 else None,
            )
            for i in range(ORDERS)
        ),
        batch_size=200,
    )  # fmt: skip
    SwitchStep.objects.bulk_create(
        (
            SwitchStep(
                order=order, position=n, node=_name(i * MOVES + n), from_phase="prefill", to_phase="decode",
                state="switched" if order.finished_at else "draining", began_at=order.ordered_at,
                finished_at=order.finished_at,
            )
            for i, order in enumerate(orders)
            for n in range(MOVES)
        ),
        batch_size=2000,
    )  # fmt: skip


def _operations(partition: Any) -> None:
    """Alerts, versions, and edits with who and why; what triggers wrote of one edit is copied for the others."""
    from django.db import connection

    from apps.flowcontrol.models import Band
    from apps.telemetry.models import Alert
    from apps.topology.models import ConfigurationVersion, Node

    Alert.objects.bulk_create(
        Alert(partition=partition, rule="queue-old", subject=f"b{i}", severity="warning", summary="s",
              state="resolved" if i < 1960 else "firing" if i < 1980 else "pending", since=_at(i, 2000),
              fired_at=_at(i, 2000), resolved_at=_at(i, 2000) if i < 1960 else None)
        for i in range(2000)
    )  # fmt: skip
    document = ConfigurationVersion.objects.get(partition=partition).document
    for i in range(200):
        ConfigurationVersion.objects.create(
            partition=partition, version=i + 2, document=document, author="person", reason="edit"
        )
    for i in range(NODE_EDITS):  # one trigger row a node each
        Node.objects.filter(partition=partition).update(generation=i + 1)
    Band.objects.filter(partition=partition, name="standard").update(max_requests=1001)
    event = Band.pgh_event_model  # type: ignore[attr-defined]
    row = event.objects.order_by("-pgh_id").first()
    names = [str(f.column) for f in event._meta.concrete_fields if not f.primary_key]
    own = {"pgh_created_at": "now() - (%(n)s - i) * interval '1 minute'", "max_requests": "1000 + i %% 7",
           "pgh_context_id": "md5('bench' || i)::uuid"}  # fmt: skip
    values = ", ".join(own.get(name, f'"{name}"') for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO pghistory_context (id, created_at, updated_at, metadata) SELECT md5('bench' || i)::uuid, now(), "
            "now(), jsonb_build_object('actor', CASE WHEN i %% 9973 = 0 THEN 'rare' ELSE 'person' END, 'actor_kind', "
            "'person', 'reason', 'edit ' || i, 'request_id', md5('request' || i)) FROM generate_series(1, %(n)s) AS i",
            {"n": EDITS},
        )
        cursor.execute(
            f"INSERT INTO {event._meta.db_table} ({columns}) SELECT {values} FROM {event._meta.db_table}, "  # noqa: S608
            "generate_series(1, %(n)s) AS i WHERE pgh_id = %(id)s",
            {"n": EDITS, "id": row.pk},
        )


def snapshot(nodes: int, tenants: int, seq: int) -> dict[str, Any]:
    """What a gateway publishes of so many nodes, with so many flows in each of three bands."""
    from tests.console.kit import band, node
    from tests.console.kit import snapshot as one

    flows = [{"id": f"tenant-{i}", "waiting": i, "oldest_s": 1.0, "dispatched_total": i} for i in range(tenants)]
    bands = [
        band(name, priority, 10, flows=flows) for name, priority in (("premium", 100), ("standard", 0), ("free", -10))
    ]
    rows = [node(f"{PARTITION}-{i}", _phase(i)) for i in range(nodes)]
    data: dict[str, Any] = one(PARTITION, seq, nodes=rows, bands=bands)
    data["recent"] = [data["recent"][0] | {"id": f"req-{i}"} for i in range(50)]
    return data
