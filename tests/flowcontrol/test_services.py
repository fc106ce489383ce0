"""Bands, objectives and limits: edits are checked, audited and published."""

import math

import pytest

from apps.flowcontrol import choices, selectors, services
from apps.flowcontrol.domain import config
from apps.flowcontrol.models import Band, BandEvent
from apps.topology import configuration
from controlplane.actors import SYSTEM
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.factories import actor_with, make_partition, make_tenant

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition():
    return make_partition()


def test_an_edited_priority_reorders_the_published_bands(partition):
    services.update_band(selectors.band_named(partition, "standard"), SYSTEM, priority=101)
    document = configuration.latest(partition).document
    assert [(band["name"], band["priority"]) for band in document["bands"]] == [("standard", 101), ("premium", 100)]


def test_a_taken_priority_is_a_conflict_that_names_its_holder(partition):
    with pytest.raises(Conflict, match="band premium has priority 100 already"):
        services.update_band(selectors.band_named(partition, "standard"), SYSTEM, priority=100)
    with pytest.raises(Conflict):
        services.create_band(partition, "third", 0, SYSTEM)


def test_two_bands_can_trade_priorities(partition):
    bands = services.set_priorities(partition, {"premium": 0, "standard": 100}, actor_with("operator"))
    assert [band.name for band in bands] == ["standard", "premium"]


def test_trading_into_the_same_priority_is_refused(partition):
    with pytest.raises(Conflict, match="same priority"):
        services.set_priorities(partition, {"premium": 0}, SYSTEM)
    assert selectors.band_named(partition, "premium").priority == 100


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fairness": "lottery"}, "fairness"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"max_requests": 0}, "max_requests"),
        ({"min_share": 1.5}, "min_share"),
        ({"priority": 2**40}, "priority"),
        ({"name": "other"}, "name"),
    ],
)
def test_a_bad_value_of_a_band_is_refused_by_name(partition, changes, field):
    with pytest.raises(InvalidField) as refusal:
        services.update_band(selectors.band_named(partition, "standard"), SYSTEM, **changes)
    assert refusal.value.field == field
    assert selectors.band_named(partition, "standard").priority == 0


def test_guaranteed_shares_never_exceed_the_whole(partition):
    services.update_band(selectors.band_named(partition, "premium"), SYSTEM, min_share=0.7)
    with pytest.raises(InvalidField, match=r"all bands together at most 0\.9"):
        services.update_band(selectors.band_named(partition, "standard"), SYSTEM, min_share=0.4)


def test_viewers_cannot_edit(partition):
    with pytest.raises(Forbidden, match="operator"):
        services.update_band(selectors.band_named(partition, "standard"), actor_with("viewer"), priority=5)


def test_an_edit_that_changes_nothing_makes_no_version(partition):
    version = configuration.latest(partition).version
    services.update_band(selectors.band_named(partition, "standard"), SYSTEM, priority=0)
    assert configuration.latest(partition).version == version


def test_a_band_in_use_cannot_be_deleted(partition):
    with pytest.raises(Conflict, match="used by standard"):
        services.delete_band(selectors.band_named(partition, "standard"), SYSTEM)


def test_a_deleted_band_leaves_its_history(partition):
    band = services.create_band(partition, "night", -5, SYSTEM)
    services.delete_band(band, actor_with("operator"), "no longer needed")
    assert not Band.objects.filter(name="night").exists()
    last = BandEvent.objects.filter(name="night").latest("pgh_id")
    assert (last.pgh_label, last.pgh_context.metadata["reason"]) == ("delete", "no longer needed")


def test_the_default_objective_of_a_tenant_cannot_be_deleted(partition):
    make_tenant()
    with pytest.raises(Conflict, match="default of acme"):
        services.delete_objective(selectors.objective_named(partition, "standard"), SYSTEM)


def test_an_objective_moves_to_a_band_of_its_own_partition_only(partition):
    other = make_partition("laptop", ("mixed", "mixed"))
    with pytest.raises(InvalidField, match="not a band of gb300"):
        services.update_objective(
            selectors.objective_named(partition, "standard"), SYSTEM, band=selectors.band_named(other, "premium")
        )
    services.update_objective(
        selectors.objective_named(partition, "standard"), SYSTEM, band=selectors.band_named(partition, "premium")
    )
    objectives = configuration.latest(partition).document["objectives"]
    assert {o["name"]: o["band"] for o in objectives} == {"premium": "premium", "standard": "premium"}


def test_a_part_of_the_default_band_can_be_edited(partition):
    services.update_flow_settings(partition, SYSTEM, default_band={"ttl_s": 5.0}, prefill_limit_per_node=9)
    document = configuration.latest(partition).document
    assert (document["default_band"]["ttl_s"], document["default_band"]["fairness"]) == (5.0, "round-robin")
    assert document["flow"]["prefill"]["limit_per_node"] == 9


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"default_band": {"colour": "red"}}, "default_band.colour"),
        ({"default_band": {"ordering": "lifo"}}, "default_band.ordering"),
        ({"default_band": 3}, "default_band"),
        ({"prefill_limit_per_node": 0}, "prefill_limit_per_node"),
        ({"decode_detector": "guess"}, "decode_detector"),
    ],
)
def test_a_bad_flow_setting_is_refused_by_name(partition, changes, field):
    with pytest.raises(InvalidField) as refusal:
        services.update_flow_settings(partition, SYSTEM, **changes)
    assert refusal.value.field == field


def test_the_choices_are_what_the_machine_offers():
    assert set(choices.Fairness.values) == set(config.FAIRNESS_POLICIES)
    assert set(choices.Ordering.values) == set(config.ORDERING_POLICIES)
    assert set(choices.Detector.values) == set(config.DETECTORS)
    assert set(choices.LimitMode.values) == set(config.DETECTOR_MODES)


def test_a_limit_can_be_left_to_the_engines(partition):
    services.update_flow_settings(partition, SYSTEM, decode_limit_per_node=None)
    assert configuration.latest(partition).document["flow"]["decode"]["limit_per_node"] is None
