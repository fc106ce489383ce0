"""Bootstrap: the described run as rows; a second start adds nothing, keeps edits and shows no secret again."""

import json
import stat

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from apps.flowcontrol import services as flowcontrol
from apps.flowcontrol.models import Band, FlowSettings, Objective
from apps.planning.models import PlannerPolicy
from apps.tenancy.models import ApiKey, Tenant
from apps.tenancy.selectors import live_key
from apps.topology import configuration
from apps.topology.models import ConfigurationVersion, Node, Partition
from controlplane import bootstrap, clusters
from controlplane.actors import SYSTEM
from controlplane.permissions import Role
from workers.yard.config import PartitionConfig

pytestmark = pytest.mark.django_db
TABLES = (Partition, Node, Band, Objective, FlowSettings, PlannerPolicy, Tenant, ApiKey, User)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    monkeypatch.delenv("SWITCHYARD_ADMIN_PASSWORD", raising=False)
    return tmp_path


@pytest.fixture
def start(data, capsys):
    """`manage.py bootstrap`; what it printed."""

    def start(*arguments):
        call_command("bootstrap", *arguments)
        return capsys.readouterr().out

    return start


def counts():
    return {model.__name__: model.objects.count() for model in TABLES}


def test_the_first_start_describes_both_clusters_and_gateways_accept_them(start):
    start()
    described = clusters.load(clusters.DEFAULT_FILE)
    for cluster in described.clusters:
        partition = Partition.objects.get(name=cluster.name)
        config = PartitionConfig.parse(configuration.latest(partition).document)
        assert {name: node.phase for name, node in config.nodes.items()} == cluster.nodes
        assert PlannerPolicy.objects.filter(partition=partition).count() == 1


def test_the_administrators_password_is_printed_once_and_opens_the_console(start, client):
    (line,) = [line for line in start().splitlines() if line.startswith("console login")]
    password = line.split(" / ")[1].split()[0]
    assert client.login(username=bootstrap.ADMINISTRATOR, password=password)
    assert User.objects.get().groups.get().name == Role.ADMINISTRATOR
    again = start()
    assert "console login" not in again
    assert password not in again


def test_a_given_password_is_taken_and_not_printed(start, client, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_ADMIN_PASSWORD", "a long enough password")
    assert "a long enough password" not in start()
    assert client.login(username=bootstrap.ADMINISTRATOR, password="a long enough password")


def test_a_second_start_adds_nothing_and_publishes_nothing(start):
    start()
    rows = counts()
    versions = {each.name: configuration.latest(each).version for each in Partition.objects.all()}
    start()
    assert counts() == rows
    assert {each.name: configuration.latest(each).version for each in Partition.objects.all()} == versions


def test_a_second_start_keeps_what_people_have_changed(start):
    start()
    band = Band.objects.filter(partition__name="gb300").first()
    flowcontrol.update_band(band, SYSTEM, "an operator's choice", priority=4711)
    Node.objects.filter(name="gb300-1").update(draining=True)
    Tenant.objects.update(paused=True)
    start()
    band.refresh_from_db()
    assert band.priority == 4711
    assert Node.objects.get(name="gb300-1").draining
    assert not Tenant.objects.filter(paused=False).exists()


def test_the_keys_are_kept_in_a_file_that_only_the_owner_reads(start, data):
    printed = start()
    file = data / "keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = json.loads(file.read_text())
    assert {live_key(text).name for text in kept.values()} == set(kept)
    shown = [name for name, text in kept.items() if text in printed]
    assert shown == [name for name in kept if name != "replay"]
    assert not [text for text in kept.values() if text in start()]
    assert json.loads(file.read_text()) == kept


def test_a_lost_keys_file_is_said(start, data):
    start()
    (data / "keys.json").unlink()
    assert "rotate it to get a new one" in start()


def test_addresses_follow_the_ports_of_the_run_and_nothing_else_does(start, tmp_path):
    def rows():
        partitions = {row["name"]: row for row in Partition.objects.values() if row.pop("gateway_url", None)}
        nodes = {row["name"]: row for row in Node.objects.values() if row.pop("url", None)}
        return partitions, nodes, list(Band.objects.order_by("id").values()), list(ApiKey.objects.values("sha256"))

    start()
    before = rows()
    ports = tmp_path / "ports.json"
    ports.write_text('{"gateway": {"gb300": 4001}, "agent": {"gb300-1": 4002}}')
    start("--ports", str(ports))
    assert Partition.objects.get(name="gb300").gateway_url == "http://127.0.0.1:4001"
    assert ":4002/nodes/gb300-1" in Node.objects.get(name="gb300-1").url
    assert rows() == before
    published = configuration.latest(Partition.objects.get(name="gb300")).document
    assert published["nodes"][0]["url"] == "http://127.0.0.1:4002/nodes/gb300-1"


def test_every_start_publishes_one_version_of_a_partition_at_most(start, tmp_path):
    def versions():
        rows = ConfigurationVersion.objects.order_by("version")
        return {
            each.name: list(rows.filter(partition=each).values_list("version", "reason"))
            for each in Partition.objects.all()
        }

    start()
    assert versions() == {"gb300": [(1, "first start")], "laptop": [(1, "first start")]}
    ports = tmp_path / "ports.json"
    nodes = {node.name: 4000 + node.pk for node in Node.objects.filter(partition__name="gb300")}
    ports.write_text(json.dumps({"gateway": {"gb300": 4001}, "agent": nodes}))
    start("--ports", str(ports))
    assert versions()["gb300"] == [(1, "first start"), (2, "addresses of this run")]
    assert versions()["laptop"] == [(1, "first start")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gateway": {"nowhere": 1}}', "gateway.nowhere is unknown"),
        ('{"agent": {"gb300-1": 70000}}', "expected a port from 1 to 65535"),
        ('{"web": {}}', "web is unknown"),
        ('{"gateway": 3}', "ports.json"),
        ("{", "ports.json"),
    ],
)
def test_wrong_ports_are_refused_by_name_and_nothing_is_written(start, tmp_path, text, message):
    ports = tmp_path / "ports.json"
    ports.write_text(text)
    with pytest.raises(CommandError, match=message):
        start("--ports", str(ports))
    assert not Partition.objects.exists()


def test_a_description_that_cannot_be_read_is_refused(start, tmp_path):
    file = tmp_path / "clusters.yaml"
    file.write_text("clusters: 3")
    with pytest.raises(CommandError, match="clusters"):
        start("--clusters", str(file))
    assert not User.objects.exists()
