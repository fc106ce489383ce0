"""Publishing: every edit becomes a version that a gateway can read."""

import json

import pytest
import redis

from apps.flowcontrol.services import update_band
from apps.topology import configuration, services
from apps.topology.models import Cluster, ConfigurationVersion, Partition
from controlplane.actors import SYSTEM
from tests.factories import MODEL, NETWORK, actor_with, make_partition, make_tenant
from workers.yard.config import PartitionConfig

pytestmark = pytest.mark.django_db


def test_a_gateway_accepts_the_document_of_a_described_partition():
    partition = make_partition()
    make_tenant()
    version = configuration.latest(partition)
    config = PartitionConfig.parse(version.document)
    assert config.version == version.version
    assert [node.phase for node in config.nodes.values()] == ["prefill", "decode", "decode"]
    assert [(band.name, band.priority) for band in config.flow.bands] == [("premium", 100), ("standard", 0)]
    assert config.tenants["acme"].default_objective == "standard"


def test_an_edit_makes_the_next_version_with_its_author_and_reason():
    partition = make_partition()
    first = configuration.latest(partition).version
    update_band(partition.bands.get(name="standard"), actor_with("operator"), "agents first", priority=200)
    latest = configuration.latest(partition)
    assert latest.version == first + 1
    assert (latest.author, latest.reason) == ("robin", "agents first")
    assert latest.document["bands"][0]["name"] == "standard"


def test_publishing_an_unchanged_document_keeps_the_version():
    partition = make_partition()
    before = configuration.latest(partition)
    assert configuration.publish(partition, SYSTEM, "again") == before
    assert ConfigurationVersion.objects.filter(partition=partition).count() == before.version


def test_a_partition_without_nodes_is_not_published():
    cluster = Cluster.objects.create(name="empty")
    partition = Partition.objects.create(
        cluster=cluster, name="empty", model=MODEL, network=NETWORK, gateway_url="http://127.0.0.1:1"
    )
    assert configuration.publish(partition, SYSTEM, "too early") is None
    assert configuration.latest(partition) is None


def test_a_section_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="bands"):
        configuration.register_section("bands", lambda partition: [])


def test_the_document_reaches_redis_after_the_commit(redis_client, django_capture_on_commit_callbacks):
    listener = redis_client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("switchyard:gb300:config-changed")
    listener.get_message(timeout=2)
    with django_capture_on_commit_callbacks(execute=True):
        partition = make_partition()
        assert redis_client.get("switchyard:gb300:config") is None
    held = json.loads(redis_client.get("switchyard:gb300:config"))
    assert held == configuration.latest(partition).document
    assert listener.get_message(timeout=2)["data"] == str(held["version"])


def test_a_flushed_redis_is_healed_once(redis_client):
    partition = make_partition()
    assert configuration.republish(partition) is True
    assert configuration.republish(partition) is False
    redis_client.flushall()
    assert configuration.republish(partition) is True
    assert json.loads(redis_client.get("switchyard:gb300:config"))["partition"] == "gb300"


def test_an_edit_survives_a_redis_that_is_away(monkeypatch, django_capture_on_commit_callbacks):
    def refuse():
        raise redis.ConnectionError("away")

    monkeypatch.setattr("controlplane.redis_client.client", refuse)
    with django_capture_on_commit_callbacks(execute=True):
        partition = make_partition()
    assert configuration.latest(partition).version == 1


def test_a_changed_routing_policy_is_published():
    partition = make_partition()
    services.update_partition(partition, SYSTEM, routing_policy="least-loaded")
    assert configuration.latest(partition).document["routing"] == {"policy": "least-loaded"}
