"""Queues: a band is edited in place and becomes a version of the configuration; a tenant is paused and resumed."""

import pytest

from apps.flowcontrol.models import Band, BandEvent
from apps.tenancy.models import Tenant
from apps.topology import configuration

BAND = "/p/gb300/queues/bands/standard/"
TENANT = "/p/gb300/queues/tenants/acme/"


def filled(**changes):
    band = Band.objects.get(name="standard")
    names = ("priority", "ttl_s", "max_requests", "max_bytes", "min_share", "ceiling", "fairness", "ordering")
    values = {name: getattr(band, name) for name in names} | {"reason": ""} | changes
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
        ({"ttl_s": ""}, "ttl_s", "required"),
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
