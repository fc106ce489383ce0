from __future__ import annotations

import pytest

from apps.flowcontrol.domain.config import BandConfig, FlowConfig, FlowConfigError

DOCUMENT = {
    "bands": [
        {"name": "premium", "priority": 100, "fairness": "global-strict", "ordering": "edf", "max_requests": 10,
         "max_bytes": 1000, "ttl_s": 5, "ceiling": 0.9, "min_share": 0.1},
        {"name": "standard", "priority": 0},
    ],
    "default_band": {"fairness": "round-robin", "ordering": "fcfs", "max_requests": 7, "max_bytes": None, "ttl_s": 9,
                     "ceiling": 1.0, "min_share": 0},
    "flow": {"max_requests": 100, "max_bytes": None, "default_ttl_s": 60, "empty_pool_ttl_s": 15, "displacement": False,
             "prefill": {"detector": "concurrency", "mode": "requests", "limit_per_node": 4},
             "decode": {"limit_per_node": "auto"}},
}  # fmt: skip


def test_a_whole_document_is_read():
    config = FlowConfig.parse(DOCUMENT)
    assert config.bands[0] == BandConfig("premium", 100, "global-strict", "edf", 10, 1000, 5.0, 0.9, 0.1)
    assert config.bands[1] == BandConfig("standard", 0)
    assert (config.max_requests, config.default_ttl_s, config.empty_pool_ttl_s) == (100, 60.0, 15.0)
    assert (config.displacement, config.prefill.limit_per_node, config.decode.limit_per_node) == (False, 4, None)


def test_an_unknown_band_is_made_from_the_template_with_its_own_priority():
    config = FlowConfig.parse(DOCUMENT)
    assert config.band_for("nightly", -3) == BandConfig("nightly", -3, max_requests=7, ttl_s=9.0)
    assert config.band_for("premium", -3).priority == 100


def test_an_empty_document_is_a_usable_configuration():
    assert FlowConfig.parse({}) == FlowConfig()


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"bands": 3}, "bands", "a list of bands"),
        ({"bands": ["x"]}, "bands[0]", "an object"),
        ({"bands": [{"priority": 1}]}, "bands[0].name", "a non-empty text"),
        ({"bands": [{"name": "a"}]}, "bands[0].priority", "a whole number"),
        ({"bands": [{"name": "a", "priority": True}]}, "bands[0].priority", "a whole number"),
        ({"bands": [{"name": "a", "priority": 1, "fairness": "luck"}]}, "bands[0].fairness", "round-robin"),
        ({"bands": [{"name": "a", "priority": 1, "ttl_s": -1}]}, "bands[0].ttl_s", "seconds above 0"),
        ({"bands": [{"name": "a", "priority": 1, "max_requests": 0}]}, "bands[0].max_requests", "null for no limit"),
        ({"bands": [{"name": "a", "priority": 1, "ceiling": 1.5}]}, "bands[0].ceiling", "a number from 0 to 1"),
        ({"bands": [{"name": "a", "priority": 1, "colour": "red"}]}, "bands[0].colour", "no such field"),
        ({"bands": [{"name": "a", "priority": 1}, {"name": "a", "priority": 2}]}, "bands[1].name", "no other band"),
        ({"bands": [{"name": "a", "priority": 1}, {"name": "b", "priority": 1}]}, "bands[1].priority", "no other band"),
        ({"flow": {"prefill": {"detector": "guess"}}}, "flow.prefill.detector", "concurrency"),
        ({"flow": {"decode": {"limit_per_node": 0}}}, "flow.decode.limit_per_node", "a whole number from 1"),
        ({"flow": {"displacement": "yes"}}, "flow.displacement", "true or false"),
        ({"flow": {"unknown": 1}}, "flow.unknown", "no such field"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_belongs_there(change, field, expected):
    with pytest.raises(FlowConfigError) as error:
        FlowConfig.parse({**DOCUMENT, **change})
    assert error.value.field == field
    assert expected in error.value.expected
    assert field in str(error.value)
