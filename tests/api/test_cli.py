"""The command line against the API itself: what operators type does what it says, for people and for programs."""

import json

import httpx
import pytest
import yaml

from apps.planning.models import PlannerPolicy, Proposal, SwitchOrder
from apps.telemetry.models import Alert
from apps.tenancy.models import ApiKey, Tenant
from apps.topology.models import Node
from controlplane.cli import __main__ as cli
from controlplane.cli.parser import TREE
from controlplane.cli.tables import span

pytestmark = pytest.mark.django_db


@pytest.fixture
def switchyard(partition, key_of, monkeypatch, capsys, client):
    """Runs one command as an administrator, or the role's key; gives exit status, output and complaint."""
    client.raise_request_exception = False

    def send(request):
        kept = ("authorization", "idempotency-key", "content-type")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        path = request.url.raw_path.decode()
        media = headers.pop("content-type", "application/json")
        answer = client.generic(request.method, path, request.content, content_type=media, headers=headers)
        return httpx.Response(answer.status_code, content=answer.content, headers=dict(answer.items()))

    transport = httpx.MockTransport(send)
    keys = {}

    def switchyard(*typed, role="administrator"):
        if role not in keys:
            keys[role] = key_of(role) if role else ""
        monkeypatch.setenv("SWITCHYARD_API_KEY", keys[role])
        status = cli.main(typed, transport)
        told = capsys.readouterr()
        return status, told.out, told.err

    return switchyard


@pytest.fixture
def data(switchyard):
    """The same, for what works, as JSON."""

    def data(*typed, **more):
        status, out, complaint = switchyard(*typed, "--json", **more)
        assert status == 0, complaint
        return json.loads(out)

    return data


def test_status_says_at_once_how_everything_is(switchyard, live):
    status, out, _ = switchyard("status")
    assert status == 0
    assert "gb300" in out and "2P2D, mode approve" in out


def test_status_says_so_when_the_gateway_is_silent(switchyard, redis_client):
    status, out, _ = switchyard("status", role="viewer")
    assert status == 0
    assert "has not reported" in out


@pytest.mark.parametrize(
    "typed",
    [
        "bands list", "split show", "split history", "split decisions", "split wait", "nodes list", "requests list --ended",
        "requests show r-1", "requests sums", "tenants list", "keys list acme", "config export", "config export --flow", "config history",
        "audit", "alerts list", "alerts list --state firing", "channels list", "whoami",
    ],
)  # fmt: skip
def test_what_is_read_is_a_table_for_people_and_json_for_programs(switchyard, typed):
    status, table, complaint = switchyard(*typed.split(), role="viewer")
    assert (status, complaint) == (0, "")
    assert table.strip()
    status, told, _ = switchyard(*typed.split(), "--json", role="viewer")
    assert status == 0
    json.loads(told)


def test_what_the_gateway_would_answer_is_a_clear_complaint_without_one(switchyard):
    for typed in ("requests list", "branches list", "requests cancel r-9 -m stuck", "branches end b -m dead"):
        status, out, complaint = switchyard(*typed.split())
        assert (status, out) == (2, ""), typed
        assert "Unavailable" in complaint


def test_a_table_has_a_line_a_row(switchyard):
    lines = switchyard("nodes", "list")[1].splitlines()
    assert lines[0].startswith("node ")
    assert [line.split()[0] for line in lines[1:]] == ["gb300-1", "gb300-2", "gb300-3", "gb300-4"]


def test_the_split_is_proposed_approved_and_rolled_back(switchyard, data, address):
    made = data("split", "propose", "3", "-m", "more prompts")
    assert len(made["prefill"]) == 3
    assert data("split", "reject", "-m", "not now")["state"] == "rejected"
    number = address("{order}")  # a proposal of the planner, approved and switched
    back = data("split", "rollback", str(number), "-m", "it hurts", "--yes")
    assert back["rolls_back"] == int(number)
    assert SwitchOrder.objects.count() == 2


def test_the_open_proposal_need_not_be_numbered(data, address):
    address("{proposal}")
    assert data("split", "approve", "--yes")["state"] == "approved"
    assert Proposal.objects.get().votes.count() == 1


def test_force_and_freeze_are_set_and_ended(data, partition):
    forced = data("split", "force", "gb300-1,gb300-3", "-m", "a test", "--expires-in", "60", "-y")
    assert forced["forced"]["prefill"] == ["gb300-1", "gb300-3"]
    assert data("split", "unforce")["forced"] is None
    assert data("split", "freeze", "-m", "maintenance", "--expires-in", "3600", "-y")["mode"] == "frozen"
    assert data("split", "unfreeze")["mode"] == "approve"
    assert data("split", "mode", "advisory")["mode"] == "advisory"


def test_nothing_grave_is_done_without_a_yes(switchyard, partition):
    for typed in ("split force 1 -m x", "split freeze -m x", "nodes phase gb300-1 decode -m x", "keys revoke 1"):
        status, _, complaint = switchyard(*typed.split())
        assert (status, "--yes" in complaint) == (2, True), typed
    assert not SwitchOrder.objects.exists()
    assert PlannerPolicy.objects.get().mode == "approve"


def test_bands_nodes_and_tenants_are_edited(data, partition):
    assert data("bands", "set", "premium", "--priority", "7", "-m", "busy")["priority"] == 7
    assert data("nodes", "drain", "gb300-1", "-m", "a fan")["draining"] is True
    assert data("nodes", "undrain", "gb300-1")["draining"] is False
    assert data("tenants", "create", "umbrella", "--weight", "2")["weight"] == 2
    assert data("tenants", "pause", "umbrella")["paused"] is True
    assert data("tenants", "resume", "umbrella")["paused"] is False


def test_a_key_is_issued_shown_once_rotated_and_revoked(switchyard, data):
    made = data("keys", "issue", "acme", "ci", "--role", "viewer", "--expires-at", "2099-01-01T00:00:00Z")
    assert made["secret"].startswith("sy_")
    assert made["secret"] not in switchyard("keys", "list", "acme")[1]
    rotated = data("keys", "rotate", str(made["key"]["id"]))
    assert rotated["secret"] != made["secret"]
    assert data("keys", "revoke", str(rotated["key"]["id"]), "-y")["revoked_at"]
    assert ApiKey.objects.get(pk=rotated["key"]["id"]).revoked_at


def test_a_channel_is_made_changed_tested_rotated_and_deleted(switchyard, data):
    made = data("channels", "create", "pager", "http://127.0.0.1:9/", "--kinds", "alert,switch", "-m", "nights")
    assert made["channel"]["kinds"] == ["alert", "switch"]
    assert data("channels", "set", "pager", "--to", "http://127.0.0.1:9/hook", "--kinds", "*")["kinds"] == ["*"]
    assert data("channels", "disable", "pager")["enabled"] is False
    assert data("channels", "enable", "pager")["enabled"] is True
    status, out, _ = switchyard("channels", "test", "pager")
    assert status == 1 and out.startswith("pager: ConnectError")
    assert "given up" in switchyard("channels", "deliveries", "pager")[1]
    new = data("channels", "rotate", "pager", "-y")
    assert new["secret"] != made["secret"]
    assert new["secret"] not in switchyard("channels", "list")[1]
    assert "say what to change" in switchyard("channels", "set", "pager")[2]
    assert data("channels", "delete", "pager", "-y") == {"deleted": "pager"}
    assert switchyard("channels", "list")[1] == "no channel\n"


def test_what_was_exported_is_compared_edited_and_applied(switchyard, data, tmp_path):
    file = tmp_path / "yard.yaml"
    file.write_text(switchyard("config", "export")[1])
    assert switchyard("diff", "-f", str(file))[:2] == (0, "nothing to change\n")
    documents = list(yaml.safe_load_all(file.read_text()))
    next(d for d in documents if d["kind"] == "Tenant" and d["metadata"]["name"] == "acme")["spec"]["weight"] = 3
    file.write_text(yaml.safe_dump_all(documents))
    status, out, _ = switchyard("diff", "-f", str(file))
    assert status == 1
    assert out == "Tenant/acme.weight\n  - 1\n  + 3\n1 field would change\n"
    assert Tenant.objects.get(name="acme").weight == 1
    assert data("apply", "-f", str(file), "-m", "a big customer")["applied"] is True
    assert Tenant.objects.get(name="acme").weight == 3
    assert switchyard("diff", "-f", str(file))[0] == 0


def test_flow_control_goes_back_to_a_version(data, address):
    version = address("{version}")
    data("bands", "set", "premium", "--priority", "7")
    assert data("config", "revert", version, "--dry-run")["applied"] is False
    assert data("config", "revert", version)["changes"][0]["path"] == "bands[premium].priority"


def test_an_alert_is_looked_after(data, address):
    number = address("{alert}")
    assert data("alerts", "ack", number, "-m", "on it")["acknowledged_by"]
    assert Alert.objects.get(pk=number).note == "on it"


def test_a_refusal_names_the_field_and_is_a_problem_for_programs(switchyard):
    status, out, complaint = switchyard("nodes", "drain", "nobody")
    assert (status, out) == (2, "")
    assert complaint == "switchyard: Not found: there is no node called 'nobody'\n"
    status, out, _ = switchyard("bands", "set", "premium", "--ceiling", "-1", "--json")
    assert (status, json.loads(out)["errors"][0]["field"]) == (2, "ceiling")


def test_a_complaint_is_json_for_programs_whoever_complains(switchyard):
    for typed, says in (
        ("apply -f /nowhere.yaml --json", "/nowhere.yaml"),
        ("bands set premium --json", "say what to change"),
        ("nodes drain nobody --json", "there is no node"),
    ):
        status, out, complaint = switchyard(*typed.split())
        assert status == 2 and says in json.loads(out)["detail"] and says in complaint


def test_a_list_of_nothing_cannot_be_asked_for(capsys):
    for number in ("0", "-1", "x", "1.5"):
        with pytest.raises(SystemExit) as left:
            cli.main(["config", "history", "-n", number])
        assert left.value.code == 2
        assert f"expected a whole number of at least 1, got {number!r}" in capsys.readouterr().err


def test_a_forced_split_is_one_word_and_the_reason_beside_it_can_be_read(switchyard):
    switchyard("split", "force", "1", "-m", "a test of long names", "-y")
    assert "1P3D, by key:acme/administrator-key: a test of long names" in switchyard("split", "show")[1]


def test_the_audit_trail_says_why_before_it_lists_fields(switchyard):
    switchyard("bands", "set", "premium", "--priority", "7", "-m", "busy")
    heads, line = switchyard("audit", "--table", "band", "-n", "1")[1].splitlines()
    assert heads.split()[-2:] == ["why", "fields"]
    assert line.split()[-2:] == ["busy", "priority"]


def test_a_role_that_is_too_low_and_a_key_that_is_missing_are_told(switchyard):
    assert "Forbidden" in switchyard("nodes", "drain", "gb300-1", role="viewer")[2]
    assert "SWITCHYARD_API_KEY" in switchyard("nodes", "list", role="")[2]
    assert Node.objects.filter(draining=True).count() == 0


def test_an_address_where_nobody_answers_is_told(capsys, monkeypatch):
    for url in ("http://127.0.0.1:9", "gopher://x", "http://[", "nonsense"):
        assert cli.main(["status", "--url", url]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(switchyard):
    assert "nowhere.yaml" in switchyard("apply", "-f", "/nowhere.yaml")[2]


@pytest.mark.parametrize("name", TREE)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    assert "usage: switchyard" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, "–"), (0.0, "0.00 s"), (0.0028, "2.8 ms"), (0.042, "42 ms"), (0.2, "0.20 s"), (30.0, "30 s"), (150, "2 min")]
)  # fmt: skip
def test_a_time_is_told_in_the_unit_that_shows_it(seconds, told):
    """Time per output token is a few thousandths of a second."""
    assert span(seconds) == told
