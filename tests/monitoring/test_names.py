"""What the shipped dashboard, alert rules and KEDA example ask Prometheus for is what `/metrics` really says."""

import json
import re
from pathlib import Path

import pytest
import yaml

from apps.telemetry.rules import BY_NAME
from apps.tenancy.services import issue_key
from controlplane.actors import SYSTEM
from tests.factories import make_partition, make_tenant
from tests.gateway.world import AGENT_TOKEN, prompt, world

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
NAME = re.compile(r"\b((?:switchyard|llm_d_epp)_[a-z0-9_]+)")


def expressions():
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    keda = yaml.safe_load((FOLDER / "keda.yaml").read_text())["spec"]["triggers"]
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [rule["expr"] for rule in rules] + [trigger["metadata"]["query"] for trigger in keda]


def asked_for():
    return {name for expression in expressions() for name in NAME.findall(expression)}


def told(text):
    """Names of series in an exposition, those without a sample yet included."""
    names = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            names |= {name, f"{name}_total"} if kind == "counter" else {name}
            if kind == "histogram":
                names |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return names


@pytest.fixture
def control_plane(client, db, redis_client):
    make_partition("gb300")
    key = issue_key(make_tenant("acme"), "prometheus", SYSTEM, role="viewer")
    answer = client.get("/metrics", headers={"Authorization": f"Bearer {key.plain_text}"})
    assert answer.status_code == 200
    return answer.content.decode()


async def test_every_name_exists(control_plane, tmp_path):
    async with world(tmp_path) as yard:
        await yard.complete(prompt(4))
        async with yard.http.get(f"{yard.url}/metrics") as answer:
            gateway = await answer.text()
        headers = {"Authorization": f"Bearer {AGENT_TOKEN}"}
        async with yard.http.get(f"{yard.agent.base_url}/nodes/n1/metrics", headers=headers) as answer:
            node = await answer.text()
    missing = asked_for() - told(control_plane) - told(gateway) - told(node)
    assert missing == set()


def test_alert_names_are_the_consoles_own():
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} <= set(BY_NAME)
    assert all(rule["labels"]["severity"] == BY_NAME[rule["alert"]].severity for rule in rules)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer nonsense"}])
def test_metrics_want_a_key(client, db, header):
    answer = client.get("/metrics", headers=header)
    assert answer.status_code == 401 and answer["WWW-Authenticate"] == "Bearer"


def test_a_key_for_inference_reads_no_metrics(client, db, redis_client):
    key = issue_key(make_tenant("acme"), "app", SYSTEM)
    assert client.get("/metrics", headers={"Authorization": f"Bearer {key.plain_text}"}).status_code == 403


def test_metrics_tell_the_split(control_plane):
    assert 'switchyard_split_nodes{partition="gb300",phase="decode"} 2.0' in control_plane
    assert "switchyard_planner_mode" in control_plane
