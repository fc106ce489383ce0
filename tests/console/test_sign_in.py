"""Signing in: right, wrong, too often, and out again."""

import pytest

from apps.console import throttle
from tests.factories import make_user

PASSWORD = "a long enough password"


@pytest.fixture
def olga(db, redis_client):
    return make_user("olga", "operator")


def sign_in(client, password=PASSWORD, **more):
    return client.post("/login/", {"username": "olga", "password": password, **more})


def test_the_right_password_opens_the_page_that_was_asked_for(client, olga):
    answer = sign_in(client, next="/p/gb300/queues/")
    assert (answer.status_code, answer.url) == (302, "/p/gb300/queues/")


def test_no_one_is_sent_to_a_strange_site(client, olga):
    assert sign_in(client, next="https://elsewhere.example/").url == "/"


def test_a_wrong_password_is_refused_without_saying_which_part_was_wrong(client, olga):
    answer = sign_in(client, "wrong")
    assert answer.status_code == 422
    assert b"do not match" in answer.content
    assert b"wrong" not in answer.content


def test_guessing_is_slowed_down_even_with_the_right_password(client, olga):
    for _ in range(throttle.MAX_FAILURES):
        assert sign_in(client, "wrong").status_code == 422
    answer = sign_in(client)
    assert answer.status_code == 429
    assert 0 < int(answer["Retry-After"]) <= throttle.WINDOW_S
    assert b"Too many wrong tries" in answer.content


def test_a_success_forgets_the_wrong_tries_before_it(client, olga):
    for _ in range(throttle.MAX_FAILURES - 1):
        sign_in(client, "wrong")
    assert sign_in(client).status_code == 302
    client.logout()
    assert sign_in(client, "wrong").status_code == 422
    assert sign_in(client).status_code == 302


def test_signing_out_needs_a_post_and_ends_the_session(client, olga):
    client.force_login(olga)
    assert client.get("/logout/").status_code == 405
    assert client.post("/logout/").status_code == 302
    assert client.get("/").url.startswith("/login/")


def test_a_form_without_its_token_gets_an_explanation(olga):
    from django.test import Client

    strict = Client(enforce_csrf_checks=True)
    answer = strict.post("/login/", {"username": "olga", "password": PASSWORD})
    assert answer.status_code == 403
    assert b"This form has expired" in answer.content
