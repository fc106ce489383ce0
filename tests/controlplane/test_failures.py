"""PostgreSQL is away: everything answers 503 and says so; nothing fails as if it were a fault of ours."""

import logging
import sys

import pytest
from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.test import Client, RequestFactory

from controlplane.failures import failed
from controlplane.logs import Brief
from tests.factories import make_partition, make_user


@pytest.fixture
def away(monkeypatch, db):
    """Somebody signed in, and a database that goes away after that."""
    make_partition("gb300")
    client = Client(raise_request_exception=False)
    client.force_login(make_user("robin", "viewer"))

    def gone(*arguments, **more):
        raise OperationalError("connection is bad")

    monkeypatch.setattr("controlplane.permissions.Actor.person", gone)
    return client


def test_a_page_says_that_the_database_is_away_and_asks_again(away):
    page = away.get("/p/gb300/")
    assert page.status_code == 503 and page["Retry-After"] == "2"
    assert "PostgreSQL does not answer" in page.content.decode() and 'http-equiv="refresh"' in page.content.decode()


def test_rest_answers_with_problem_details(away):
    answer = away.get("/api/v1/partitions/gb300/nodes")
    assert answer.status_code == 503 and answer["Content-Type"] == "application/problem+json"
    assert answer.json()["code"] == "database-away" and answer["Retry-After"] == "2"


def test_an_error_beside_the_views_is_told_in_the_same_way():
    requests = RequestFactory()
    try:
        raise InterfaceError("connection already closed")
    except InterfaceError:
        assert failed(requests.get("/p/gb300/")).status_code == 503
        assert b"database-away" in failed(requests.get("/api/v1/me")).content
    try:
        raise KeyError("a fault")
    except KeyError:
        assert failed(requests.get("/p/gb300/")).status_code == 500
        assert b"internal" in failed(requests.get("/api/v1/me")).content


@pytest.mark.parametrize(
    ("error", "kept"), [(PermissionDenied("no"), False), (OperationalError("x"), False), (KeyError("x"), True)]
)
def test_refusals_and_outages_are_one_line_of_the_log(error, kept):
    try:
        raise error
    except Exception:
        record = logging.LogRecord("django.request", logging.ERROR, "", 1, "%s: %s", ("Broke", "/p/"), sys.exc_info())
    assert Brief().filter(record) and bool(record.exc_info) is kept
    assert record.getMessage().startswith("Broke: /p/")
