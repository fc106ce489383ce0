"""What requests came to in a period, in all and by band and tenant; tenant users are told of their own alone."""

import json
import time

import pytest

from apps.telemetry import services
from apps.tenancy import services as tenancy
from apps.tenancy.models import Tenant
from controlplane.actors import SYSTEM

pytestmark = pytest.mark.django_db
SUMS = "/partitions/gb300/request-sums"


def _ended(number, seconds_ago, **changes):
    return {
        "kind": "request", "id": f"s-{number}", "t": time.time() - seconds_ago, "tenant": "acme", "band": "standard",
        "prompt_tokens": 1000, "cached_tokens": 800, "computed_tokens": 200, "output_tokens": 11, "queue_s": 0.1,
        "ttft_s": 0.5, "predicted_ttft_s": 0.4, "e2e_s": 2.5, "outcome": "completed", "lost": {"evicted": 64}, **changes,
    }  # fmt: skip


@pytest.fixture
def ended(partition):
    tenancy.create_tenant("rival", SYSTEM)
    rows = [
        _ended(1, 60),
        _ended(2, 90, outcome="failed"),
        _ended(3, 120, tenant="rival", band="premium", queue_s=2.0),
        _ended(4, 86_400, tenant="rival"),
    ]
    services.store_entries(partition, rows, "1-1")


@pytest.fixture
def member(rest):
    tenancy.add_member(Tenant.objects.get(name="acme"), rest.users["tenant"], SYSTEM)
    return rest


def test_the_last_hour_is_summed_up_unless_a_period_is_asked_for(rest, ended):
    status, told = rest("get", SUMS, role="viewer")
    assert status == 200
    whole = told["whole"]
    assert (whole["requests"], whole["outcomes"]) == (3, {"completed": 2, "failed": 1})
    assert whole["tokens"]["prompt_tokens"] == 3000
    assert whole["lost_tokens"] == {"evicted": 192}
    assert whole["times_s"]["ttft"]["n"] == 3
    assert whole["times_s"]["ttft"]["p95"] == pytest.approx(0.5, rel=0.025)
    assert whole["prediction_error_ratio"]["p50"] == pytest.approx(0.2, rel=0.025)
    assert [(b["band"], b["requests"]) for b in told["bands"]] == [("premium", 1), ("standard", 2)]
    assert [(t["tenant"], t["requests"], t["mean_ttft_s"]) for t in told["tenants"]] == [
        ("acme", 2, 0.5), ("rival", 1, 0.5),
    ]  # fmt: skip
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 2 * 86_400))
    assert rest("get", f"{SUMS}?since={since}", role="viewer")[1]["whole"]["requests"] == 4


def test_it_is_narrowed_by_band_or_by_tenant(rest, ended):
    told = rest("get", f"{SUMS}?band=premium", role="viewer")[1]
    assert (told["whole"], told["tenants"]) == (None, [])
    assert [(b["band"], b["queue_s"]["n"]) for b in told["bands"]] == [("premium", 1)]
    told = rest("get", f"{SUMS}?tenant=rival", role="viewer")[1]
    assert (told["whole"], told["bands"]) == (None, [])
    assert [t["tenant"] for t in told["tenants"]] == ["rival"]


def test_a_tenant_user_is_told_of_the_own_tenant_alone(member, ended):
    for narrowed in ("", "?tenant=acme"):
        status, told = member("get", SUMS + narrowed, role="tenant")
        assert status == 200
        assert (told["whole"], told["bands"]) == (None, [])
        assert [(t["tenant"], t["requests"]) for t in told["tenants"]] == [("acme", 2)]
        assert "rival" not in json.dumps(told)
    for narrowed in ("?tenant=rival", "?band=premium"):
        assert member("get", SUMS + narrowed, role="tenant")[0] == 403, narrowed


def test_who_belongs_to_no_tenant_is_refused(rest, ended):
    assert rest("get", SUMS, role="tenant")[0] == 403


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("since=2031-01-01T00:00:00Z", "since"),
        ("since=2020-01-01T00:00:00Z", "since"),
        ("until=2020-01-01T00:00:00Z", "since"),
        ("since=yesterday", "since"),
        ("band=premium&tenant=acme", "band"),
    ],
)
def test_a_period_without_sums_is_refused_by_name(rest, ended, query, field):
    status, problem = rest("get", f"{SUMS}?{query}")
    assert status == 422
    assert field in json.dumps(problem["errors"]) + problem["detail"]
