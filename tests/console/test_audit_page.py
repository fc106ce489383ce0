"""The audit trail page: every row is on some page, also those that one edit gave the same time."""

import re

import pytest

from apps.flowcontrol.models import Band
from apps.topology.models import Node
from controlplane import audit_trail
from controlplane.audit_trail import Narrow, trail
from tests.factories import make_node

BASE = "/p/gb300/audit/"


@pytest.fixture
def many(partition, monkeypatch):
    """Twelve nodes and two bands changed by two statements of one transaction: fourteen rows of one time."""
    for i in range(8):
        make_node(partition, f"more-{i}", 10 + i, "decode")
    Node.objects.filter(partition=partition).update(decode_limit=77)
    Band.objects.filter(partition=partition).update(max_requests=77)
    monkeypatch.setattr(audit_trail, "PAGE", 5)
    return partition


def pages(client, address):
    """What each page lists, following the link to older ones."""
    found = []
    while address:
        answer = client.get(address)
        found.append([(row.table, row.number) for row in answer.context["rows"]])
        link = re.search(r'href="(\?[^"]*before=[^"]*)">Older', answer.content.decode())
        address = BASE + link[1].replace("&amp;", "&") if link else None
    return found


def test_rows_of_one_time_are_all_listed_once_over_the_pages(as_role, many, monkeypatch):
    every = [(entry.table, entry.number) for entry in trail(many, Narrow(), 1000)[0]]
    monkeypatch.setattr(trail, "__defaults__", (5,))
    found = pages(as_role("viewer"), BASE)
    assert len(found) > 4
    assert [row for page in found for row in page] == every
    assert len(set(every)) == len(every)


def test_a_change_is_shown_beside_what_it_was_and_a_creation_with_all_it_has(as_role, many):
    entries, more = trail(many, Narrow(table="band"), 2)
    assert more and [entry.done for entry in entries] == ["changed", "changed"]
    assert {(change.field, change.after) for change in entries[0].changes} == {("max_requests", 77)}
    assert entries[0].changes[0].before not in (None, 77)
    created = trail(many, Narrow(table="node"), 1000)[0][-1]
    assert created.done == "created"
    assert [(change.before, change.after) for change in created.changes if change.field == "name"] == [
        (None, "gb300-1")
    ]


def test_the_number_of_queries_depends_on_the_tables_shown_alone(many, django_assert_max_num_queries):
    with django_assert_max_num_queries(1 + 2 * 2):
        trail(many, Narrow(), 14)
    with django_assert_max_num_queries(1):
        assert trail(many, Narrow(request_id="nothing")) == ([], False)
        assert trail(many, Narrow(cause="no uuid")) == ([], False)


@pytest.mark.parametrize("skip", ["x", "-1", "99999999", "²"])
def test_a_place_that_is_none_begins_at_the_time_given(as_role, many, skip):
    assert as_role("viewer").get(BASE, {"before": "2020-01-01T00:00:00Z", "skip": skip}).status_code == 200
