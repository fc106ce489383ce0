"""`Idempotency-Key`: a repeated POST is answered, not done again."""

import json
from datetime import timedelta

import pytest

from apps.tenancy.models import ApiKey, IdempotentCall, Tenant
from tests.api.conftest import is_problem

NEW = {"name": "umbrella"}


def test_a_repeat_gets_the_first_answer_and_does_nothing(rest):
    first = rest.answer("post", "/tenants", NEW, Idempotency_Key="k-1")
    again = rest.answer("post", "/tenants", NEW, Idempotency_Key="k-1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert (first.get("Idempotent-Replayed"), again["Idempotent-Replayed"]) == (None, "true")
    assert Tenant.objects.filter(name="umbrella").count() == 1


def test_without_the_header_a_repeat_is_done_again(rest):
    assert rest("post", "/tenants", NEW)[0] == 201
    assert rest("post", "/tenants", NEW)[0] == 409


@pytest.mark.parametrize(("path", "body"), [("/tenants", {"name": "other"}), ("/tenants/acme/pause", NEW)])
def test_one_key_for_two_requests_is_refused(rest, path, body):
    rest("post", "/tenants", NEW, Idempotency_Key="k-1")
    answer = rest.answer("post", path, body, Idempotency_Key="k-1")
    assert (answer.status_code, json.loads(answer.content)["code"]) == (422, "idempotency-key-reused")
    assert is_problem(answer)
    assert not Tenant.objects.filter(name="other").exists()


def test_each_caller_has_keys_of_its_own(rest, key_of):
    assert rest("post", "/tenants/acme/pause", {}, role="operator", Idempotency_Key="k-1")[0] == 200
    for other in ({"role": "administrator"}, {"key": key_of("operator")}):
        answer = rest.answer("post", "/tenants/acme/pause", {}, Idempotency_Key="k-1", **other)
        assert (answer.status_code, answer.get("Idempotent-Replayed")) == (200, None)


def test_the_text_of_a_new_key_is_shown_once_and_not_kept(rest):
    first = rest.answer("post", "/tenants/acme/keys", {"name": "k"}, Idempotency_Key="k-1").json()
    again = rest.answer("post", "/tenants/acme/keys", {"name": "k"}, Idempotency_Key="k-1").json()
    assert first["secret"].startswith("sy_")
    assert again == {**first, "secret": None}
    assert first["secret"] not in IdempotentCall.objects.get().body
    assert ApiKey.objects.filter(name="k").count() == 1


def test_a_refused_call_may_be_tried_again_with_the_same_key(rest):
    body = {"name": "chat", "band": "bulk"}
    assert rest("post", "/partitions/gb300/objectives", body, Idempotency_Key="k-1")[0] == 422
    rest("post", "/partitions/gb300/bands", {"name": "bulk", "priority": 5})
    assert rest("post", "/partitions/gb300/objectives", body, Idempotency_Key="k-1")[0] == 201


def test_an_answer_is_forgotten_after_a_day(rest):
    rest("post", "/tenants/acme/pause", {}, Idempotency_Key="k-1")
    for hours, replayed in ((23, "true"), (25, None)):
        IdempotentCall.objects.update(created_at=IdempotentCall.objects.get().created_at - timedelta(hours=hours))
        answer = rest.answer("post", "/tenants/acme/pause", {}, Idempotency_Key="k-1")
        assert (answer.status_code, answer.get("Idempotent-Replayed")) == (200, replayed)


@pytest.mark.parametrize("key", ["x" * 201, "a\x07b"])
def test_a_key_that_cannot_be_kept_is_refused_by_name(rest, key):
    answer = rest.answer("post", "/tenants", NEW, Idempotency_Key=key)
    assert (answer.status_code, json.loads(answer.content)["errors"][0]["field"]) == (422, "Idempotency-Key")
    assert is_problem(answer)
    assert not Tenant.objects.filter(name="umbrella").exists()


def test_a_stranger_gets_no_remembered_answer(rest):
    rest("post", "/tenants", NEW, Idempotency_Key="k-1")
    assert rest("post", "/tenants", NEW, role="", Idempotency_Key="k-1")[0] == 401
    assert IdempotentCall.objects.count() == 1
