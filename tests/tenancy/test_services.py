"""Tenants and keys: who may make them, and what of a key is kept."""

import hashlib
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from apps.tenancy import selectors, services
from apps.tenancy.models import ApiKey, ApiKeyEvent, TenantEvent
from apps.topology import configuration
from controlplane.actors import SYSTEM, Actor
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden, Role, require, require_tenant_view
from tests.factories import actor_with, make_partition, make_tenant, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition():
    return make_partition()


def test_only_the_digest_of_a_key_is_kept(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM)
    assert issued.plain_text.startswith("sy_")
    assert issued.key.sha256 == hashlib.sha256(issued.plain_text.encode()).hexdigest()
    assert issued.plain_text not in repr(issued)
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(k)::text FROM tenancy_apikey k")
        assert issued.plain_text not in cursor.fetchone()[0]


def test_an_issued_key_reaches_every_gateway(partition):
    make_partition("laptop", ("mixed", "mixed"))
    issued = services.issue_key(make_tenant(), "harness", SYSTEM, objectives=["premium"], trusted=True)
    for each in (partition, partition.__class__.objects.get(name="laptop")):
        (key,) = configuration.latest(each).document["keys"]
        assert (key["sha256"], key["tenant"], key["trusted"]) == (issued.key.sha256, "acme", True)


def test_a_revoked_key_is_gone_from_the_document_and_from_login(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM)
    assert selectors.live_key(issued.plain_text) == issued.key
    services.revoke_key(issued.key, SYSTEM, "leaked")
    assert selectors.live_key(issued.plain_text) is None
    assert configuration.latest(partition).document["keys"] == []


def test_rotation_keeps_the_rights_and_ends_the_old_key(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM, role="viewer", objectives=["standard"])
    fresh = services.rotate_key(issued.key, SYSTEM)
    assert selectors.live_key(issued.plain_text) is None
    assert selectors.live_key(fresh.plain_text) == fresh.key
    assert (fresh.key.role, fresh.key.objectives, fresh.key.name) == ("viewer", ["standard"], "harness")


def test_a_rotation_is_published_once(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM)
    before = configuration.latest(partition).version
    services.rotate_key(issued.key, SYSTEM)
    assert configuration.latest(partition).version == before + 1


def test_a_revoked_key_cannot_be_rotated(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM)
    revoked = services.revoke_key(issued.key, SYSTEM)
    with pytest.raises(Conflict, match="revoked"):
        services.rotate_key(revoked, SYSTEM)


def test_an_expired_key_does_not_open_anything(partition):
    issued = services.issue_key(make_tenant(), "harness", SYSTEM, expires_at=timezone.now() + timedelta(hours=1))
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert selectors.live_key(issued.plain_text) is None


def test_two_live_keys_of_one_name_are_refused(partition):
    tenant = make_tenant()
    services.issue_key(tenant, "harness", SYSTEM)
    with pytest.raises(Conflict, match="already has a key"):
        services.issue_key(tenant, "harness", SYSTEM)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"objectives": ["gold"]}, "objectives"),
        ({"objectives": []}, "objectives"),
        ({"role": "owner"}, "role"),
        ({"expires_at": timezone.now() - timedelta(days=1)}, "expires_at"),
    ],
)
def test_a_bad_value_of_a_key_is_refused_by_name(partition, fields, field):
    with pytest.raises(InvalidField) as refusal:
        services.issue_key(make_tenant(), "harness", SYSTEM, **fields)
    assert refusal.value.field == field


def test_using_a_key_is_noted_at_most_once_a_minute_and_not_audited(partition):
    key = services.issue_key(make_tenant(), "harness", SYSTEM).key
    events = ApiKeyEvent.objects.count()
    services.touch_key(key)
    key.refresh_from_db()
    first = key.last_used_at
    services.touch_key(key)
    key.refresh_from_db()
    assert key.last_used_at == first is not None
    assert ApiKeyEvent.objects.count() == events


def test_operators_pause_tenants_but_do_not_make_them(partition):
    tenant = make_tenant()
    operator = actor_with("operator")
    assert services.pause_tenant(tenant, operator, "runaway").paused
    assert configuration.latest(partition).document["tenants"][0]["paused"] is True
    assert not services.resume_tenant(tenant, operator).paused
    with pytest.raises(Forbidden, match="administrator"):
        services.create_tenant("other", operator)
    with pytest.raises(Forbidden, match="administrator"):
        services.update_tenant(tenant, operator, sharing_domain="elsewhere")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weight": 0}, "weight"),
        ({"default_objective": "gold"}, "default_objective"),
        ({"sharing_domain": "a b"}, "sharing_domain"),
    ],
)
def test_a_bad_value_of_a_tenant_is_refused_by_name(partition, changes, field):
    with pytest.raises(InvalidField) as refusal:
        services.update_tenant(make_tenant(), SYSTEM, **changes)
    assert refusal.value.field == field


def test_a_taken_tenant_name_is_a_conflict(partition):
    make_tenant()
    with pytest.raises(Conflict):
        make_tenant()


def test_an_overlong_reason_is_refused(partition):
    with pytest.raises(InvalidField, match="500"):
        services.pause_tenant(make_tenant(), SYSTEM, "x" * 501)


def test_the_history_of_a_tenant_outlives_the_user_who_made_it(partition):
    user = make_user("dana", "administrator")
    services.create_tenant("acme", Actor.person(user), "asked for")
    user.delete()
    (event,) = TenantEvent.objects.filter(name="acme", pgh_label="insert")
    assert event.pgh_context.metadata["actor"] == "dana"


def test_a_tenant_user_sees_the_own_tenant_only(partition):
    user = make_user("tess")
    services.add_member(make_tenant(), user, SYSTEM)
    actor = Actor.person(user)
    assert actor.roles == {Role.TENANT}
    assert require_tenant_view(actor, "acme") is actor
    with pytest.raises(Forbidden):
        require_tenant_view(actor, "other")
    assert [tenant.name for tenant in selectors.tenants_visible_to(actor)] == ["acme"]
    services.remove_member(make_tenant("beta"), user, SYSTEM)


@pytest.mark.parametrize(
    ("held", "asked", "allowed"),
    [
        ("viewer", "viewer", True),
        ("viewer", "operator", False),
        ("operator", "viewer", True),
        ("operator", "administrator", False),
        ("administrator", "operator", True),
        ("tenant", "viewer", False),
    ],
)
def test_roles_include_the_ones_before_them(held, asked, allowed):
    if allowed:
        assert require(actor_with(held), asked)
    else:
        with pytest.raises(Forbidden, match=asked):
            require(actor_with(held), asked)


def test_of_two_who_take_one_name_at_once_the_second_is_told(monkeypatch):
    """Both looked before either wrote: then only the database knows."""
    make_tenant("acme")
    monkeypatch.setattr("controlplane.records.validate", lambda row: None)
    with pytest.raises(Conflict, match="somebody else"):
        services.create_tenant("acme", SYSTEM)


def test_keys_of_somebody_who_may_not_log_in_are_taken_by_no_gateway(partition):
    """Nor once somebody else's account is closed; opened again, they are back."""
    tenant, bob = make_tenant(), make_user("bob", "operator")
    services.issue_key(tenant, "service", SYSTEM)
    services.issue_key(tenant, "bobs", SYSTEM, owner="bob")
    for active, known in ((False, 1), (True, 2)):
        bob.is_active = active
        bob.save()
        assert len(configuration.latest(partition).document["keys"]) == known


def test_a_login_publishes_nothing(partition):
    bob = make_user("bob", "operator")
    services.issue_key(make_tenant(), "bobs", SYSTEM, owner="bob")
    before = configuration.latest(partition).version
    bob.last_login = timezone.now()
    bob.save(update_fields=["last_login"])
    assert configuration.latest(partition).version == before


def test_the_admin_site_renames_nobody(client, admin_user):
    """Votes, keys and the audit trail go by names: renamed, one could vote twice."""
    bob = make_user("bob", "operator")
    client.force_login(admin_user)
    page = client.get(f"/admin/auth/user/{bob.pk}/change/").content.decode()
    assert 'name="is_active"' in page and 'name="username"' not in page
    assert 'name="username"' in client.get("/admin/auth/user/add/").content.decode()
