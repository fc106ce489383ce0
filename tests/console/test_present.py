"""From numbers to what is shown: unknown is not zero, nothing is clamped silently, colours follow what a node does."""

import pytest

from apps.console import formats, timeline
from apps.console.present import node_kind, present
from tests.console.kit import band, node, snapshot


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.5, "500 ms"),
        (1.234, "1.23 s"),
        (75, "1 min 15 s"),
        (7200, "2 h 0 min"),
    ],
)
def test_spans_of_time_read_well(value, said):
    assert formats.duration(value) == said


@pytest.mark.parametrize(("value", "said"), [(None, "–"), (0, "0"), (9999, "9,999"), (12_345, "12.3k"), (5e6, "5M")])
def test_counts_read_well(value, said):
    assert formats.count(value) == said


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "prefill"),
        ({"state": "draining"}, "draining"),
        ({"state": "switching"}, "switching"),
        ({"state": "draining", "health": "down"}, "down"),
        ({"health": "stale"}, "prefill"),
        ({"phase": "new-kind"}, "down"),
    ],
)
def test_a_node_counts_as_what_it_is_doing(changes, kind):
    assert node_kind(node("a-1", **changes)) == kind


def test_an_empty_snapshot_shows_as_unknown_not_as_zero():
    view = present({"t": 100.0}, 101.0)
    assert view["verdict"]["level"] == "down"
    assert view["latency"]["ttft_p95"] == "–"
    assert view["reuse"]["actual"] == "–"
    assert view["split"]["text"] == "no nodes"
    assert view["age_s"] == 1.0


def test_a_saturation_above_one_keeps_its_number_while_its_bar_ends():
    stage = present(snapshot(), 0.0)["stages"][0]
    assert (stage["saturation"], stage["share"], stage["tone"]) == ("130 %", "100.0%", "bad")


def test_bands_go_by_priority_and_name_what_was_dropped():
    bands = [band("low", -1), band("high", 5, dropped={"rejected-ttl-expired": 3, "evicted-priority": 0})]
    view = present(snapshot(bands=bands), 0.0)
    assert [row["name"] for row in view["bands"]] == ["high", "low"]
    assert view["bands"][0]["dropped_text"] == "3 expired"


def test_a_refused_configuration_is_a_notice_with_the_running_version():
    notices = present(snapshot(config_error="bands: two of priority 3"), 0.0)["notices"]
    assert notices[0]["tone"] == "bad"
    assert "runs version 1: bands: two of priority 3" in notices[0]["text"]


def test_a_draining_node_says_where_it_goes_and_stays_among_its_peers():
    nodes = [node("a-1", "decode"), node("a-2", state="draining", target_phase="decode"), node("a-3")]
    view = present(snapshot(nodes=nodes), 0.0)
    assert [car["short"] for car in view["split"]["cars"]] == ["2", "3", "1"]
    assert view["nodes"][1]["label"] == "draining → decode"


# -- phase lanes -----------------------------------------------------------------------------------------------------


def move(began, finished, **changes):
    values = {"node": "a-1", "from_phase": "decode", "to_phase": "prefill", "state": "switched", "order": 4} | changes
    return timeline.Move(began=began, finished=finished, **values)


def lane(moves, phase="prefill", start=0.0, now=100.0):
    parts = timeline.lanes({"a-1": phase}, moves, start, now)[0]["parts"]
    return [(part["kind"], part["left"], part["width"]) for part in parts]


def test_a_lane_without_moves_is_one_phase():
    assert lane([], "decode") == [("decode", "0.00%", "100.00%")]


def test_a_finished_move_splits_its_lane_in_three():
    assert lane([move(20, 30)]) == [
        ("decode", "0.00%", "20.00%"),
        ("switching", "20.00%", "10.00%"),
        ("prefill", "30.00%", "70.00%"),
    ]


def test_a_running_move_reaches_to_now():
    assert lane([move(90, None, state="draining")]) == [("decode", "0.00%", "90.00%"), ("draining", "90.00%", "10.00%")]


def test_a_failed_move_leaves_the_node_in_its_old_phase():
    assert lane([move(20, 30, state="failed")], "decode")[-1] == ("decode", "30.00%", "70.00%")


def test_a_move_that_began_before_the_lane_is_cut_at_its_start():
    assert lane([move(-5, 10)]) == [("switching", "0.00%", "10.00%"), ("prefill", "10.00%", "90.00%")]


def test_moves_that_ended_before_the_lane_do_not_count():
    assert lane([move(-20, -10)], "decode") == [("decode", "0.00%", "100.00%")]


def test_a_lane_is_empty_before_anything_was_known():
    parts = timeline.lanes({"a-1": "decode"}, [], 0.0, 100.0, 40.0)[0]["parts"]
    assert [(part["left"], part["width"]) for part in parts] == [("40.00%", "60.00%")]


def test_a_switch_thinner_than_a_line_is_the_border_between_its_phases():
    moves = [
        move(50, 50.5),
        move(70, 70.5, from_phase="prefill", to_phase="decode", state="failed", reason="no answer"),
    ]
    parts = timeline.lanes({"a-1": "prefill"}, moves, 0.0, 100.0, least_s=1.0)[0]["parts"]
    assert [(part["kind"], part["began"], part["ended"]) for part in parts] == [
        ("decode", 0, 50), ("prefill", 50, 70), ("switching", 70, 70.5), ("prefill", 70.5, 100),
    ]  # fmt: skip
    assert [part["kind"] for part in timeline.lanes({"a-1": "prefill"}, moves[:1], 0.0, 100.0)[0]["parts"]] == [
        "decode",
        "switching",
        "prefill",
    ]
