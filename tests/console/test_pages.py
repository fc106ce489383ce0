"""Every page: who may see it, what it says without a gateway, what it costs, and that no script is inline."""

import re

import pytest
from django.urls import reverse

from tests.factories import make_user

PAGES = ("overview", "queues", "split", "nodes")
PARTS = ("split-state", "timeline")
READS = PAGES + PARTS
# (address name, further arguments) of everything that only an operator, or only an administrator, may use.
OPERATOR_ONLY = [("band", ["premium"]), ("tenant", ["acme"]), ("approve", [1]), ("reject", [1]), ("roll-back", [1])]
ADMINISTRATOR_ONLY = [
    ("force", []),
    ("clear-force", []),
    ("freeze", []),
    ("unfreeze", []),
    ("mode", []),
    ("force-node", ["gb300-1"]),
    ("clear-node-force", ["gb300-1"]),
]


def url(name, *arguments):
    return reverse(name, args=["gb300", *arguments])


@pytest.mark.parametrize(("name", "arguments"), [(n, []) for n in READS] + OPERATOR_ONLY + ADMINISTRATOR_ONLY)
def test_nobody_gets_anywhere_without_signing_in(client, partition, name, arguments):
    for method in (client.get, client.post):
        answer = method(url(name, *arguments))
        assert answer.status_code == 302
        assert answer.url.startswith("/login/?next=")


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("role", ["viewer", "operator", "administrator"])
def test_every_page_opens_for_every_role_that_may_watch(as_role, live, name, role):
    assert as_role(role).get(url(name)).status_code == 200


@pytest.mark.parametrize("name", READS)
def test_a_tenant_user_is_told_which_role_is_missing(as_role, live, name):
    answer = as_role("tenant").get(url(name))
    assert answer.status_code == 403
    assert b"needs the role viewer" in answer.content
    assert b"Back to the overview" in answer.content


@pytest.mark.parametrize(("name", "arguments"), OPERATOR_ONLY + ADMINISTRATOR_ONLY)
def test_a_viewer_changes_nothing(as_role, live, name, arguments):
    assert as_role("viewer").post(url(name, *arguments)).status_code == 403


@pytest.mark.parametrize(("name", "arguments"), ADMINISTRATOR_ONLY)
def test_an_operator_neither_forces_nor_freezes(as_role, live, name, arguments):
    for method in ("get", "post"):
        assert getattr(as_role("operator"), method)(url(name, *arguments)).status_code == 403


@pytest.mark.parametrize("name", READS)
def test_an_unknown_partition_is_a_404_that_says_so(as_role, live, name):
    answer = as_role("viewer").get(reverse(name, args=["nowhere"]))
    assert answer.status_code == 404
    assert b"There is nothing here" in answer.content


@pytest.mark.parametrize("name", PAGES)
def test_a_silent_gateway_is_said_not_guessed(as_role, partition, name):
    answer = as_role("viewer").get(url(name))
    assert answer.status_code == 200
    assert b'data-state="empty"' in answer.content
    assert b"No live data from gb300" in answer.content or b"the gateway is silent" in answer.content


@pytest.mark.parametrize("name", PAGES)
def test_no_script_or_handler_is_inline(as_role, live, name):
    answer = as_role("administrator").get(url(name))
    page = answer.content.decode()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<[^>]*\son[a-z]+=", page) == []
    assert re.findall(r"hx-on|javascript:|hx-trigger=\"[^\"]*\[", page) == []
    assert "script-src 'self'" in answer["Content-Security-Policy"]
    assert "unsafe-inline" not in answer["Content-Security-Policy"].split("script-src")[1].split(";")[0]


@pytest.mark.parametrize("name", PAGES)
def test_what_a_client_sent_is_escaped(as_role, live, name):
    assert b"<0.5 s>" not in as_role("viewer").get(url(name)).content


@pytest.mark.parametrize(
    ("name", "queries"),
    [("overview", 7), ("queues", 9), ("split", 15), ("nodes", 11), ("split-state", 14), ("timeline", 8)],
)
def test_the_number_of_queries_of_a_page_is_known(as_role, live, django_assert_num_queries, name, queries):
    client = as_role("viewer")
    with django_assert_num_queries(queries):
        client.get(url(name))


def test_home_leads_to_the_first_partition(as_role, partition):
    assert as_role("viewer").get("/").url == "/p/gb300/"


def test_home_says_what_to_do_when_there_is_no_partition(client, db):
    client.force_login(make_user("vic", "viewer"))
    answer = client.get("/")
    assert answer.status_code == 200
    assert b"manage.py bootstrap" in answer.content


def test_an_unknown_address_gets_the_consoles_own_404(client, db):
    answer = client.get("/no/such/page/")
    assert answer.status_code == 404
    assert b"There is nothing here" in answer.content


def test_a_failure_gets_the_consoles_own_500_without_details(client, live, as_role, monkeypatch):
    def fail(*arguments, **more):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("apps.console.views.nodes.nodes_of", fail)
    client = as_role("viewer")
    client.raise_request_exception = False
    answer = client.get(url("nodes"))
    assert answer.status_code == 500
    assert b"could not show this page" in answer.content
    assert b"secret detail" not in answer.content


def test_the_chosen_colours_are_rendered_by_the_server(as_role, live):
    client = as_role("viewer")
    client.cookies["theme"] = "dark"
    assert b'data-theme="dark"' in client.get(url("overview")).content
    client.cookies["theme"] = "<script>"
    assert b'data-theme="auto"' in client.get(url("overview")).content


def test_the_overview_leads_with_the_verdict_and_compares_with_the_target(as_role, live):
    page = as_role("viewer").get(url("overview")).content.decode()
    assert "no stage is full" in page
    assert "p95 over the 1.00 s target" in page
    assert 'data-slo="1.0"' in page
