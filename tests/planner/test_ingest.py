"""Telemetry from the gateway's stream: exactly once, whatever the entries look like."""

import json

import pytest
import redis

from apps.telemetry.models import CostWindow, LoadWindow, RequestRecord, StreamCursor
from controlplane import redis_client as redis_keys
from tests.factories import make_partition
from workers.planner import ingest, tasks

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition(redis_client):
    return make_partition()


@pytest.fixture
def send(partition, redis_client):
    def send(document, raw=None):
        return redis_client.xadd(
            redis_keys.telemetry_stream(partition.name), {"d": raw if raw is not None else json.dumps(document)}
        )

    return send


def load(t0):
    return {"kind": "load", "t0": t0, "t1": t0 + 2, "arrived": 3, "prefill_waits_s": [0.1]}


def test_each_kind_of_entry_becomes_a_row(partition, send):
    send(load(10.0))
    send({"kind": "cost-window", "node": "gb300-1", "t0": 10.0, "t1": 15.0, "batch_counts": {"3": 7}})
    send({"kind": "request", "id": "r1", "t": 12.0, "outcome": "completed"})
    assert tasks.ingest(partition.name) == 3
    assert LoadWindow.objects.get().prefill_waits_s == [0.1]
    assert CostWindow.objects.get().batch_counts == {"3": 7}
    assert RequestRecord.objects.get().request_id == "r1"


def test_what_was_read_is_not_read_again(partition, send):
    last = send(load(10.0))
    tasks.ingest(partition.name)
    assert tasks.ingest(partition.name) == 0
    assert StreamCursor.objects.get().last_id == last
    send(load(12.0))
    assert tasks.ingest(partition.name) == 1


def test_a_worker_that_died_before_its_commit_reads_the_batch_again(partition, send, monkeypatch):
    send(load(10.0))

    def die(*arguments, **more):
        raise RuntimeError("killed")

    monkeypatch.setattr(StreamCursor, "save", die)
    with pytest.raises(RuntimeError):
        tasks.ingest(partition.name)
    assert LoadWindow.objects.count() == 0
    monkeypatch.undo()
    assert tasks.ingest(partition.name) == 1


def test_more_than_a_batch_is_read_in_one_go(partition, send, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH", 3)
    for index in range(8):
        send(load(10.0 + 2 * index))
    assert tasks.ingest(partition.name) == 8


@pytest.mark.parametrize("raw", ["not json", "[]", "{}", '{"kind": "unknown"}', '{"kind": "load", "t0": "x"}'])
def test_an_entry_that_cannot_be_read_does_not_stop_the_stream(partition, send, raw):
    send(None, raw)
    send(load(10.0))
    assert tasks.ingest(partition.name) == 1


def test_a_redis_that_is_away_is_waited_for(partition, monkeypatch):
    def away(*arguments):
        raise redis.ConnectionError("no")

    monkeypatch.setattr(redis_keys, "client", away)
    assert tasks.ingest(partition.name) == 0
