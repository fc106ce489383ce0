"""Queues: a band is edited in place and becomes a version of the configuration; a tenant is paused and resumed."""

import pytest

from apps.console.forms import BandForm
from apps.flowcontrol.models import Band, BandEvent
from apps.flowcontrol.services import update_band
from apps.tenancy.models import Tenant
from apps.topology import configuration
from tests.console.kit import band, publish_snapshot, snapshot
from tests.factories import actor_with

BAND = "/p/gb300/queues/bands/standard/"
TENANT = "/p/gb300/queues/tenants/acme/"


def filled(**changes):
    row = Band.objects.get(name="standard")
    values = {name: "" if (value := getattr(row, name)) is None else value for name in BandForm.row_fields}
    values |= {"reason": "", **changes}
    return {f"band-standard-{name}": value for name, value in values.items()}


def test_bands_and_tenants_are_listed_with_what_waits(as_role, live):
    page = as_role("viewer").get("/p/gb300/queues/").content.decode()
    assert page.index(">premium<") < page.index(">standard<")
    assert "130 %" in page
    assert "full: requests wait" in page
    assert "Edit band" not in page


def test_an_operator_gets_the_form_with_the_present_values(as_role, partition):
    page = as_role("operator").get(BAND).content.decode()
    assert 'name="band-standard-priority" value="0"' in page
    assert "Save band standard" in page


def test_a_new_priority_is_saved_audited_and_says_its_version(as_role, partition):
    before = configuration.latest(partition).version
    answer = as_role("operator").post(BAND, filled(priority=7, reason="night run"))
    assert answer.status_code == 200
    assert Band.objects.get(name="standard").priority == 7
    version = configuration.latest(partition).version
    assert version == before + 1
    assert f'data-applies-version="{version}"' in answer.content.decode()
    event = BandEvent.objects.filter(name="standard").order_by("-pgh_id").first()
    assert event.pgh_context.metadata["actor"] == "operator-person"
    assert event.pgh_context.metadata["reason"] == "night run"


def test_saving_without_a_change_makes_no_version(as_role, partition):
    before = configuration.latest(partition).version
    answer = as_role("operator").post(BAND, filled())
    assert answer.status_code == 200
    assert b"Nothing was changed" in answer.content
    assert configuration.latest(partition).version == before


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"priority": 100}, "priority", "premium has priority 100 already"),
        ({"priority": "high"}, "priority", "whole number"),
        ({"ttl_s": "0"}, "ttl_s", ""),
        ({"max_requests": ""}, "max_requests", "required"),
        ({"max_requests": "0"}, "max_requests", ""),
        ({"min_share": "1.5"}, "min_share", ""),
        ({"fairness": "lottery"}, "fairness", "valid choice"),
        ({"reason": "x" * 501}, "reason", "500"),
    ],
)
def test_a_bad_value_is_refused_at_its_field(as_role, partition, changes, field, message):
    answer = as_role("operator").post(BAND, filled(**changes))
    page = answer.content.decode()
    assert answer.status_code == 422
    error = page.split(f'id="id_band-standard-{field}_error">')[1].split("</p>")[0]
    assert message in error
    assert 'aria-invalid="true"' in page
    assert Band.objects.get(name="standard").priority == 0


def test_a_stale_edit_shows_the_other_persons_change_and_saves_nothing(as_role, partition):
    opened = as_role("operator").get(BAND).context["form"]
    base = opened["base"].value()
    update_band(Band.objects.get(name="standard"), actor_with("operator", "robin"), "bigger queue", max_requests=77)
    typed = filled(priority=7) | {"band-standard-max_requests": 1000, "band-standard-base": base}
    answer = as_role("operator").post(BAND, typed)
    page = answer.content.decode()
    assert answer.status_code == 409
    assert "Not saved: robin changed this" in page and "bigger queue" in page
    assert "<del>1000</del> → <ins>77</ins>" in page
    stored = Band.objects.get(name="standard")
    assert (stored.priority, stored.max_requests) == (0, 77)
    again = answer.context["form"]
    assert again["priority"].value() == "7" and int(again["max_requests"].value()) == 77
    saved = as_role("operator").post(
        BAND, {f"band-standard-{f.name}": "" if f.value() is None else f.value() for f in again}
    )
    assert saved.status_code == 200
    stored.refresh_from_db()
    assert (stored.priority, stored.max_requests) == (7, 77), "both changes stand"


def test_a_forged_base_is_refused(as_role, partition):
    answer = as_role("operator").post(BAND, filled(priority=7) | {"band-standard-base": "made:up"})
    assert answer.status_code == 422 and b"open it again" in answer.content


def test_two_hundred_flows_are_cut_to_the_longest_and_found_by_id(as_role, partition, redis_client):
    flows = [{"id": f"agent-{i:03}", "waiting": i, "oldest_s": 1.0, "dispatched_total": i} for i in range(200)]
    publish_snapshot(redis_client, snapshot(bands=[band("standard", 0, 19900, flows=flows)]))
    page = as_role("viewer").get("/p/gb300/queues/").content.decode()
    listed = page.split('aria-label="Tenants of this band"')[1].split("</ul>")[0]
    assert "agent-199" in listed and "agent-100" not in listed and "and 188 flows more" in page
    found = as_role("viewer").get("/p/gb300/queues/flows/", {"find": "AGENT-017"}).content.decode()
    assert "agent-017" in found and "agent-018" not in found


def test_an_unknown_band_is_a_404(as_role, partition):
    assert as_role("operator").get("/p/gb300/queues/bands/none/").status_code == 404


def test_a_tenant_is_paused_and_resumed(as_role, partition):
    client = as_role("operator")
    answer = client.post(TENANT, {"paused": "true"})
    assert b"new requests are refused" in answer.content
    assert b"saved as v" in answer.content
    assert Tenant.objects.get(name="acme").paused
    answer = client.post(TENANT, {"paused": "false"})
    assert b"admitted" in answer.content
    assert not Tenant.objects.get(name="acme").paused


def test_pausing_needs_a_post_and_a_tenant_that_exists(as_role, partition):
    assert as_role("operator").get(TENANT).status_code == 405
    assert as_role("operator").post("/p/gb300/queues/tenants/none/", {"paused": "true"}).status_code == 404
