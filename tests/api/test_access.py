"""Every operation: it works for the lowest role that may call it, and says no to everybody below and to strangers."""

import json
import re

import pytest
from django.test import Client

from apps.planning import services as planning
from apps.planning import warmups
from apps.telemetry import gateways
from apps.tenancy import services as tenancy
from apps.tenancy.models import ApiKey, Tenant
from controlplane.actors import SYSTEM
from controlplane.api import api
from tests.api.conftest import is_problem
from tests.api.operations import BY_NAME, LOWER, OPEN_TO_TENANT_USERS, OPERATIONS
from tests.factories import make_user

pytestmark = pytest.mark.django_db
GUARDED = [operation for operation in OPERATIONS if operation.role]
# What must have happened before these make sense.
FIRST = {
    "unfreeze_split": lambda partition, actor, reason: planning.freeze(partition, actor, reason, None),
    "stop_warm_up": warmups.start,
}
WRITES = [operation for operation in GUARDED if operation.method != "get"]


def described():
    return {
        operation["operationId"]: (method, path)
        for path, operations in api.get_openapi_schema()["paths"].items()
        for method, operation in operations.items()
    }


def refused(answer, status, code, says=""):
    """What is wrong with a refusal; empty when nothing is."""
    body = json.loads(answer.content or b"null")
    if answer.status_code != status or not is_problem(answer) or body["code"] != code or says not in body["detail"]:
        return f"{answer.status_code} {body}"
    return ""


def faults(found):
    return {str(operation): fault for operation, fault in found if fault}


def test_every_operation_of_the_description_is_tested_here():
    documented = described()
    assert set(documented) == set(BY_NAME)
    for operation in OPERATIONS:
        method, template = documented[operation.name]
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
        assert operation.method == method
        assert re.fullmatch(pattern, f"/api/v1{operation.path}"), template


def test_each_works_for_the_lowest_role_that_may_call_it(rest, partition, live, address, undone):
    wrong = {}
    for operation in OPERATIONS:
        with undone():
            if operation.name in FIRST:
                FIRST[operation.name](partition, SYSTEM, "first")
            status, body = rest(
                operation.method, address(operation.path), operation.body, role=operation.role or "viewer"
            )
            if status != operation.status:
                wrong[operation.name] = (status, body)
    assert not wrong


def test_a_key_with_the_role_may_do_the_same_without_a_csrf_token(partition, live, address, key_of, undone):
    client = Client(enforce_csrf_checks=True)
    keys = {role: key_of(role) for role in ("viewer", "operator", "administrator")}
    wrong = {}
    for operation in WRITES:
        with undone():
            if operation.name in FIRST:
                FIRST[operation.name](partition, SYSTEM, "first")
            answer = client.generic(
                operation.method.upper(),
                f"/api/v1{address(operation.path)}",
                json.dumps(operation.body) if operation.body else "",
                content_type="application/json",
                headers={"Authorization": f"Bearer {keys[operation.role]}"},
            )
            if answer.status_code != operation.status:
                wrong[operation.name] = (answer.status_code, answer.content)
    assert not wrong


def test_a_stranger_is_asked_to_log_in(rest, plain):
    answers = [(each, rest.answer(each.method, plain(each.path), each.body, role="")) for each in OPERATIONS]
    assert not faults((each, refused(answer, 401, "not-authenticated")) for each, answer in answers)
    assert all(answer["WWW-Authenticate"].startswith("Bearer") for _, answer in answers)


def test_an_unknown_key_is_refused(rest, plain):
    answers = [(each, rest.answer(each.method, plain(each.path), each.body, key="sy_made-up")) for each in OPERATIONS]
    assert not faults((each, refused(answer, 401, "not-authenticated")) for each, answer in answers)


def test_a_role_too_low_is_refused_with_the_role_that_is_needed(rest, plain):
    assert not faults(
        (
            each,
            refused(
                rest.answer(each.method, plain(each.path), each.body, role=LOWER[each.role]),
                403,
                "forbidden",
                f"role {each.role}",
            ),
        )
        for each in GUARDED
    )


def test_a_key_for_inference_alone_opens_nothing(rest, plain, key_of):
    key = key_of("")
    answers = ((each, rest.answer(each.method, plain(each.path), each.body, key=key)) for each in OPERATIONS)
    assert not faults((each, refused(answer, 403, "forbidden", "inference alone")) for each, answer in answers)


def test_a_name_that_nobody_has_is_not_found(rest, live):
    assert not faults(
        (path, refused(rest.answer(each.method, path, each.body), 404, "not-found"))
        for each in OPERATIONS
        for path in each.unknown
    )


def test_a_write_by_session_needs_the_csrf_token(partition, plain):
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user("ada", "administrator"))
    answers = (
        (
            each,
            client.generic(
                each.method.upper(),
                f"/api/v1{plain(each.path)}",
                json.dumps(each.body or {}),
                content_type="application/json",
            ),
        )
        for each in WRITES
    )
    assert not faults((each, refused(answer, 403, "csrf")) for each, answer in answers)


def test_a_write_by_session_with_the_csrf_token_is_done(partition):
    client = Client(enforce_csrf_checks=True)
    make_user("ada", "administrator")
    client.get("/login/")
    client.login(username="ada", password="a long enough password")
    token = client.cookies["csrftoken"].value
    answer = client.patch(
        "/api/v1/tenants/acme", {"weight": 3}, content_type="application/json", headers={"X-CSRFToken": token}
    )
    assert (answer.status_code, answer.json()["weight"]) == (200, 3)


def test_a_revoked_key_and_an_expired_one_are_refused_at_once(rest, key_of):
    text = key_of("viewer")
    assert rest("get", "/me", key=text)[0] == 200
    key = ApiKey.objects.get(name="viewer-key")
    assert rest("post", f"/keys/{key.pk}/revoke", {})[0] == 200
    assert rest("get", "/me", key=text)[0] == 401
    ApiKey.objects.filter(pk=key.pk).update(revoked_at=None, expires_at="2020-01-01T00:00:00Z")
    assert rest("get", "/me", key=text)[0] == 401


def test_a_wrong_key_is_not_excused_by_a_session(rest):
    rest.log_in("administrator")
    answer = rest.client.get("/api/v1/me", headers={"Authorization": "Bearer nonsense"})
    assert answer.status_code == 401


def test_who_am_i_tells_the_role_of_a_key_and_its_tenant(rest, key_of):
    assert rest("get", "/me", key=key_of("operator")) == (
        200,
        {
            "kind": "key",
            "name": "acme/operator-key",
            "person": "who-has-operator-key",
            "roles": ["operator"],
            "tenants": ["acme"],
        },
    )


def test_a_use_of_a_key_is_noted_and_its_text_is_nowhere(rest, key_of):
    text = key_of("viewer")
    rest("get", "/me", key=text)
    row = ApiKey.objects.get(name="viewer-key")
    assert row.last_used_at is not None
    assert text not in json.dumps(rest("get", "/tenants/acme/keys")[1])


@pytest.fixture
def tenant_user(rest):
    tenancy.add_member(Tenant.objects.get(name="acme"), rest.users["tenant"], SYSTEM)
    tenancy.create_tenant("rival", SYSTEM)
    return rest


@pytest.mark.parametrize("name", sorted(OPEN_TO_TENANT_USERS))
def test_a_tenant_user_reads_the_own_tenant(tenant_user, name):
    assert tenant_user("get", BY_NAME[name].path, role="tenant")[0] == BY_NAME[name].status


def test_a_tenant_user_sees_nothing_of_other_tenants(tenant_user):
    assert [t["name"] for t in tenant_user("get", "/tenants", role="tenant")[1]["items"]] == ["acme"]
    for path in ("/tenants/rival", "/tenants/rival/keys", "/partitions/gb300/requests?tenant=rival", "/tenants/nobody"):
        assert tenant_user("get", path, role="tenant")[0] == 403, path


@pytest.mark.parametrize("what", ["branches", "living-requests"])
def test_a_tenant_user_is_told_of_what_lives_in_the_own_tenant_alone_and_of_no_node(tenant_user, monkeypatch, what):
    """What the gateway is asked for, and what is left of its answer."""
    asked = []

    def call(partition, method, path, params=None):
        asked.append(params)
        branch = {"id": "acme/a", "held": {"gb300-1": 5, "gb300-2": 7}, "homes": {"prefill": "gb300-1"}}
        row = {"id": "r", "tenant": "acme", "prefill_node": "gb300-1", "reason": "gb300-1: least"}
        return {"rows": [branch if path == "branches" else row], "total": 1, "closed": []}

    monkeypatch.setattr(gateways, "_call", call)
    status, body = tenant_user("get", f"/partitions/gb300/{what}", role="tenant")
    assert status == 200
    assert asked[-1]["only"] == "acme"
    assert len(body["rows"]) == 1
    assert "gb300-" not in json.dumps(body)
    tenant_user("get", f"/partitions/gb300/{what}")
    assert "only" not in asked[-1], "a viewer sees all"
    for narrowed in ("tenant=rival", "node=gb300-1"):
        assert tenant_user("get", f"/partitions/gb300/{what}?{narrowed}", role="tenant")[0] == 403


def test_configurations_are_shown_without_the_digests_of_keys(rest, address, key_of):
    key_of("viewer")
    status, body = rest("get", address("/partitions/gb300/configurations/{version}"))
    assert status == 200
    assert body["document"]["keys"]
    assert "sha256" not in json.dumps(body)
