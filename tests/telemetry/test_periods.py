"""Sums of requests in slots of time: the same as counting the records anew, whatever came late, twice or at once."""

import random
import threading
import time
from importlib import import_module

import pytest
from django.apps import apps
from django.db import connection, connections

from apps.telemetry import periods, services
from apps.telemetry.models import RequestRecord, RequestSum
from apps.topology.models import Partition
from tests.factories import make_partition

NOW = 1_750_003_000.0


def request(number, at=NOW, **changes):
    return {
        "kind": "request", "id": f"r-{number}", "t": at, "tenant": "acme", "band": "standard", "prompt_tokens": 1000,
        "cached_tokens": 800, "computed_tokens": 200, "output_tokens": 11, "queue_s": 0.1, "ttft_s": 0.5,
        "predicted_ttft_s": 0.4, "e2e_s": 2.5, "outcome": "completed", "lost": {"evicted": 64}, **changes,
    }  # fmt: skip


def stored(partition):
    rows = RequestSum.objects.filter(partition=partition)
    return {(row.slot_s, row.t0): {"data": row.data, "tenants": row.tenants} for row in rows}


def recounted(partition):
    return periods.counted(RequestRecord.objects.filter(partition=partition))


@pytest.mark.django_db
def test_a_request_is_counted_once_in_each_length_of_slot():
    partition = make_partition()
    services.store_entries(partition, [request(1)], "1-1")
    assert set(stored(partition)) == {(s, int(NOW // s) * s) for s in periods.SLOTS}
    period = periods.between(partition, NOW - 300, NOW + 1, NOW + 1)
    assert period.requests == 1
    assert period.sums.tokens == {
        "prompt_tokens": 1000,
        "computed_tokens": 200,
        "cached_tokens": 800,
        "output_tokens": 11,
    }
    assert period.sums.lost == {"evicted": 64}
    assert periods.percentile(period.sums.times["ttft"], 0.5) == pytest.approx(0.5, rel=0.025)
    assert periods.percentile(period.sums.times["tpot"], 0.99) == pytest.approx(0.2, rel=0.025)
    assert periods.percentile(period.sums.error, 0.5) == pytest.approx(0.2, rel=0.025)
    assert period.sums.bands["standard"].outcomes == {"completed": 1}


@pytest.mark.django_db
def test_sums_are_those_of_the_records_after_late_repeated_and_unordered_ones():
    partition, draw = make_partition(), random.Random(7)
    sent = [
        request(
            n, NOW - draw.uniform(0, 90_000), band=draw.choice(("premium", "free", "")), ttft_s=draw.choice((None, 1e-5, 9.0)),
            outcome=draw.choice(("completed", "dropped", "")), tenant=draw.choice(("acme", "beta", "")), output_tokens=draw.randrange(4),
            lost=draw.choice(({}, {"evicted": 3, "routed": 0}, None, "x")),
        )
        for n in range(300)
    ]  # fmt: skip
    sent += draw.sample(sent, 100)
    draw.shuffle(sent)
    for i in range(0, len(sent), 37):
        services.store_entries(partition, sent[i : i + 37], f"{i + 1}-1")
    services.store_entries(partition, sent[:37], "1-1")  # read again after a crash
    assert RequestRecord.objects.count() == 300
    assert stored(partition) == recounted(partition)
    assert sum(sum(row["data"]["outcomes"].values()) for (s, _), row in stored(partition).items() if s == 900) == 300


@pytest.mark.django_db(transaction=True)
def test_two_workers_that_store_the_same_requests_at_once_count_them_once():
    partition = make_partition()
    services.store_entries(partition, [request(0)], "1-1")
    barrier = threading.Barrier(2)
    failed = []

    def work(first):
        try:
            barrier.wait()
            for step in range(10):
                entries = [request(n, NOW + n) for n in range(step * 5 + 1, step * 5 + 21)]
                services.store_entries(partition, entries, f"{2 + step * 2 + first}-1")
        except Exception as error:
            failed.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed
    assert RequestRecord.objects.count() > 20
    assert stored(partition) == recounted(partition)


@pytest.mark.django_db
def test_a_request_from_before_1970_or_of_another_partition_disturbs_nothing():
    partition, other = make_partition(), make_partition("laptop")
    services.store_entries(other, [request(1)], "1-1")
    result = services.store_entries(partition, [request(1, -5.0), request(2)], "1-1")
    assert (result.requests, result.refused) == (2, ())
    assert stored(partition) == recounted(partition)
    assert periods.between(partition, NOW - 60, NOW + 60, NOW + 60).requests == 1


@pytest.mark.django_db
@pytest.mark.parametrize("span_s", [300, 3600, 21_600, 86_400, 7 * 86_400, 30 * 86_400])
def test_any_stretch_is_read_from_at_most_a_hundred_rows_and_one_query(span_s, django_assert_num_queries):
    partition = make_partition()
    RequestSum.objects.bulk_create(
        RequestSum(partition=partition, slot_s=s, t0=int(NOW // s) * s - i * s, data=periods.Sums({"completed": 1}).as_dict())
        for s in periods.SLOTS
        for i in range(250)
    )  # fmt: skip
    with django_assert_num_queries(1):
        period = periods.between(partition, NOW - span_s, NOW, NOW)
    assert 5 <= period.requests <= periods.ROWS_READ + 1
    assert period.start <= NOW - span_s
    assert period.end == NOW
    assert period.seconds <= span_s * 1.25


@pytest.mark.django_db
def test_what_each_tenant_used_is_added_over_its_slots(django_assert_num_queries):
    partition = make_partition()
    sent = [request(n, NOW - 100 * n, ttft_s=0.25 * (n + 1)) for n in range(3)]
    sent += [request(9, tenant="beta", ttft_s=None), request(10, NOW - 5000)]
    services.store_entries(partition, sent, "1-1")
    with django_assert_num_queries(1):
        used = periods.tenants_between(partition, NOW - 3600, NOW + 1, NOW + 1)
    acme, beta = used["acme"], used["beta"]
    assert (acme.requests, acme.prompt_tokens, acme.cached_tokens, acme.output_tokens) == (3, 3000, 2400, 33)
    assert (acme.ttft_s, beta.requests, beta.ttft_s) == (0.5, 1, None)


@pytest.mark.django_db
def test_percentiles_of_many_slots_are_within_a_few_percent_of_the_exact_ones():
    partition, draw = make_partition(), random.Random(3)
    times = [draw.lognormvariate(0, 1.2) for _ in range(2000)]
    sent = [request(n, NOW - n, ttft_s=seconds) for n, seconds in enumerate(times)]
    services.store_entries(partition, sent, "1-1")
    found = periods.between(partition, NOW - 2100, NOW + 1, NOW + 1).sums.times["ttft"]
    for share in (0.5, 0.95, 0.99):
        exact = sorted(times)[int(share * len(times)) - 1]
        assert periods.percentile(found, share) == pytest.approx(exact, rel=0.03)
    assert periods.percentile({}, 0.5) is None


@pytest.mark.django_db
def test_sums_are_kept_as_long_as_they_are_read_and_then_removed():
    partition = make_partition()
    for n, age_s in enumerate((0, 5 * 3600, 3 * 86_400, 12 * 86_400, 40 * 86_400)):
        services.store_entries(partition, [request(n, NOW - age_s)], f"{n + 1}-1")
    periods.prune(partition, NOW)
    left = {s: sum(1 for kept_s, _ in stored(partition) if kept_s == s) for s in periods.SLOTS}
    assert left == {60: 1, 900: 2, 7200: 3, 43_200: 4}


@pytest.mark.django_db
def test_what_was_stored_before_there_were_sums_is_counted_by_the_migration():
    partition, now = make_partition(), time.time()
    sent = [request(n, now - n * 40) for n in range(50)] + [request(99, now - 6 * 86_400)]
    services.store_entries(partition, sent, "1-1")
    before = {slot: row for slot, row in stored(partition).items() if slot[1] >= now - periods.SLOTS[slot[0]]}
    RequestSum.objects.all().delete()
    migration = import_module("apps.telemetry.migrations.0003_request_sums")
    migration.count_what_is_stored(apps, connection.schema_editor())
    assert stored(partition) == before
    assert Partition.objects.count() == 1
