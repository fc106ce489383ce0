"""Every address of the console, tried by everybody: strangers, each role, and a tenant's user, who sees one tenant alone."""

import pytest
from django.urls import reverse
from django.utils import timezone

from apps.console.urls import urlpatterns
from apps.planning.models import Proposal, SwitchOrder
from apps.telemetry.models import Alert, Channel, RequestRecord
from apps.telemetry.selectors import own_branch
from apps.tenancy.models import ApiKey
from apps.tenancy.services import add_member, issue_key
from controlplane.actors import SYSTEM
from tests.factories import make_tenant, make_user

# What each address needs; "tenant" is open to a tenant user too. Written down by hand: a view that forgets its check, or
# a new address that nobody thought about, fails here.
NEEDS = {
    **dict.fromkeys(
        ("queues", "waiting", "flows", "reuse", "split", "split-state", "model", "whatif", "experiment", "nodes", "timeline",
         "node-list", "alerts", "alerts-state", "audit", "settings", "version", "history", "period"), "viewer"),
    **dict.fromkeys(("overview", "palette", "requests", "request", "branches", "tenants", "tenant"), "tenant"),
    **dict.fromkeys(
        ("band", "pause-tenant", "cancel-request", "end-branch", "approve", "reject", "roll-back", "try-split",
         "run-experiment", "cancel-experiment",
         "drain-node", "undrain-node", "remove-node", "add-node", "acknowledge", "rule", "silence", "revert",
         "edit-flow", "edit-objective"), "operator"),
    **dict.fromkeys(
        ("force", "clear-force", "freeze", "unfreeze", "mode", "warm-up", "force-node", "clear-node-force", "forget-node",
         "new-tenant", "edit-tenant", "new-key", "rotate-key", "revoke-key", "add-member", "remove-member",
         "edit-policy", "edit-routing", "edit-lease", "new-channel", "test-channel", "edit-channel",
         "rotate-channel", "toggle-channel", "remove-channel"), "administrator"),
}  # fmt: skip
MAY = {
    "viewer": {"viewer", "tenant"},
    "operator": {"viewer", "tenant", "operator"},
    "administrator": {"viewer", "tenant", "operator", "administrator"},
    "tenant": {"tenant"},
}
OPEN = {"home", "login", "logout", "oidc-begin", "oidc-back"}
POST_ONLY = {"pause-tenant"}


@pytest.fixture
def world(partition, live):
    """Something behind every address: two tenants' requests and keys, a proposal, an order, an alert, a channel."""
    make_tenant("other")
    for tenant in ("acme", "other"):
        RequestRecord.objects.create(
            partition=partition, request_id=f"req-{tenant}", at=timezone.now(), tenant=tenant, outcome="completed",
            branch=f"{tenant}/b1", prefill_node="gb300-1", decode_node="gb300-3", reason="gb300-1: least predicted TTFT",
            detail={"router_terms": [{"node": "gb300-2", "total_s": 1.0}], "reason": "gb300-1: least",
                    "story": [[1.0, "queued", "prefilling", "gb300-1: least"]], "router_blind": [["no-events", ["gb300-4"]]]},
        )  # fmt: skip
    split = {name: ["gb300-1", "gb300-2"] for name in ("prefill", "from_prefill")}
    split |= {name: ["gb300-3", "gb300-4"] for name in ("decode", "from_decode")}
    later = timezone.now() + timezone.timedelta(hours=1)
    proposal = Proposal.objects.create(partition=partition, reason="r", proposed_by="p", expires_at=later, **split)
    order = SwitchOrder.objects.create(
        partition=partition, cause="planner", ordered_by="p", reason="r", state="done", from_prefill=["gb300-1"],
        from_decode=[], to_prefill=["gb300-1"], to_decode=[], drain_deadline_s=1, cooldown_s=1,
    )  # fmt: skip
    from apps.tenancy.models import Tenant

    for tenant in Tenant.objects.all():
        issue_key(tenant, "k", SYSTEM)
    member = make_user("member", "tenant")
    add_member(Tenant.objects.get(name="acme"), member, SYSTEM)
    alert = Alert.objects.create(
        partition=partition, rule="node-down", severity="critical", summary="s", state="firing"
    )
    Channel.objects.create(name="pager", url="http://127.0.0.1:9/", secret="s", kinds=["*"])
    return {
        "number": {
            "approve": proposal.pk, "reject": proposal.pk, "roll-back": order.pk, "version": 1, "revert": 1,
            "acknowledge": alert.pk, **dict.fromkeys(("rotate-key", "revoke-key"), ApiKey.objects.get(tenant__name="acme").pk),
        },
        "name": {
            "band": "premium", "rule": "node-down", "silence": "node-down", "edit-objective": "premium",
            **dict.fromkeys(("experiment", "run-experiment", "cancel-experiment"), "bands"),
            **dict.fromkeys(
                ("test-channel", "edit-channel", "rotate-channel", "toggle-channel", "remove-channel"), "pager"
            ),
        },
    }  # fmt: skip


def address(name, world, tenant="acme"):
    pattern = next(p for p in urlpatterns if p.name == name)
    values = {"partition": "gb300", "request_id": f"req-{tenant}", "username": "member"}
    values["number"] = world["number"].get(name)
    nodes = ("force-node", "clear-node-force", "drain-node", "undrain-node", "remove-node", "add-node", "forget-node")
    values["name"] = "gb300-1" if name in nodes else world["name"].get(name, tenant)
    url = reverse(name, kwargs={key: values[key] for key in pattern.pattern.converters})
    return url + (f"?id={tenant}/b1" if name == "end-branch" else "")


def ask(client, name, url):
    return client.post(url, {"paused": "true"}) if name in POST_ONLY else client.get(url)


def test_every_address_has_its_need_written_down():
    assert {pattern.name for pattern in urlpatterns} - OPEN == set(NEEDS)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_strangers_are_sent_to_sign_in(client, world, name):
    url = address(name, world)
    for answer in (client.get(url), client.post(url)):
        assert answer.status_code == 302 and answer.url.startswith("/login/?next=")


@pytest.mark.parametrize("role", sorted(MAY))
def test_each_role_opens_what_it_may_and_nothing_else(client, world, role):
    user = make_user("walker", role)
    if role == "tenant":
        from apps.tenancy.models import Tenant

        add_member(Tenant.objects.get(name="acme"), user, SYSTEM)
    client.force_login(user)
    for name, needs in NEEDS.items():
        url = address(name, world)
        answer = ask(client, name, url)
        if needs in MAY[role]:
            assert answer.status_code == 200, (role, name, answer.status_code)
        else:
            assert answer.status_code == 403, (role, name, answer.status_code)
            assert client.post(url).status_code == 403, (role, name)


def test_somebody_without_a_role_opens_nothing(client, world):
    client.force_login(make_user("nobody"))
    for name in NEEDS:
        assert ask(client, name, address(name, world)).status_code == 403, name


def test_a_tenants_user_sees_nothing_of_another_tenant(client, world):
    from django.contrib.auth.models import User

    client.force_login(User.objects.get(username="member"))
    for name in ("request", "tenant"):
        assert client.get(address(name, world, "other")).status_code == 404, name
    for name in (name for name, needs in NEEDS.items() if needs == "tenant"):
        for more in ("", "?tenant=other", "?q=req-other", "?branch=other/b1", "?format=csv", "?format=json"):
            page = client.get(address(name, world) + more).content.decode()
            # What was typed is shown again; that it was found is not.
            page = page.replace(f'value="{more.partition("=")[2]}"', "").replace(more, "")
            for secret in ("req-other", "other/b1", ">other<", '"other"'):
                assert secret not in page, (name, more, secret)


def test_a_tenants_user_hears_of_no_node(client, world):
    from django.contrib.auth.models import User

    client.force_login(User.objects.get(username="member"))
    urls = [address(name, world) for name, needs in NEEDS.items() if needs == "tenant"]
    urls += [f"{url}?format={kind}" for url in urls for kind in ("csv", "json")]
    urls += ["/api/v1/partitions/gb300/requests", "/api/v1/partitions/gb300/requests/req-acme"]
    for url in urls:
        answer = client.get(url)
        assert answer.status_code == 200, url
        for node in ("gb300-1", "gb300-2", "gb300-3", "gb300-4"):
            assert node not in answer.content.decode(), url
    assert client.get("/api/v1/partitions/gb300/requests?node=gb300-1").status_code == 403


def test_of_a_branch_a_tenants_user_hears_how_many_copies_there_are():
    row = {"id": "acme/b1", "homes": {"prefill": "gb300-1"}, "held": {"gb300-1": 3, "gb300-3": 7}}
    assert own_branch(row) == {"id": "acme/b1", "homes": {}, "held": {"copy 1": 7, "copy 2": 3}}


def test_a_tenants_user_sees_the_own_requests_and_keys(client, world):
    from django.contrib.auth.models import User

    client.force_login(User.objects.get(username="member"))
    assert "req-acme" in client.get(address("requests", world)).content.decode()
    page = client.get(address("tenant", world)).content.decode()
    assert "sy_" in page and "New key" not in page and "Rotate" not in page
    life = client.get(address("request", world)).content.decode()
    assert "Why there" not in life, "how loaded the nodes were is nobody's business"
