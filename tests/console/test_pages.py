"""Every page: who may see it, what it says without a gateway, what it costs, and that no script is inline."""

import re
import time

import pytest
from django.urls import reverse

from apps.planning.services import force_split
from controlplane.actors import SYSTEM
from tests.factories import make_user

PAGES = ("overview", "queues", "split", "nodes", "requests", "branches", "reuse", "model", "whatif", "tenants", "alerts",
         "audit", "settings")  # fmt: skip
PARTS = ("split-state", "timeline", "node-list", "waiting", "flows", "alerts-state", "history", "palette")
READS = PAGES + PARTS


def url(name, *arguments):
    return reverse(name, args=["gb300", *arguments])


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
    assert b"gb300" in answer.content


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


@pytest.mark.parametrize("role", ["viewer", "administrator"])
def test_a_page_about_something_that_has_no_past_yet_opens(as_role, live, role):
    """A tenant nobody has used, without keys and users."""
    page = as_role(role).get(url("tenant", "acme")).content.decode()
    assert "No key yet" in page and "–" in page


def test_a_force_is_told_on_every_page_with_who_why_and_until_when(as_role, live, partition):
    force_split(partition, 3, SYSTEM, "evening peak")
    for name in ("overview", "queues", "requests", "settings"):
        page = as_role("viewer").get(url(name)).content.decode()
        assert "The split is forced" in page and "evening peak" in page and "until someone ends it" in page


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


def test_a_planner_that_is_away_is_told_on_every_page_and_no_calm_is_claimed(as_role, partition, live, redis_client):
    client = as_role("viewer")
    for ago_s, told in ((5, False), (90, True)):
        redis_client.set(f"switchyard:{partition.name}:watched", str(time.time() - ago_s))
        for name in ("", "split/", "alerts/", "nodes/"):
            page = client.get(f"/p/{partition.name}/{name}").content.decode()
            assert ("worker does not answer" in page) is told, name
        state = client.get(f"/p/{partition.name}/alerts/state/").content.decode()
        assert ("Nobody looks" in state, "Nothing is wrong" in state) == (told, not told)
