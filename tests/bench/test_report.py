import json

from bench.report import report


def test_a_measurement_is_one_json_line_with_all_fields(capsys):
    assert report("dispatch", 70_000.0, "requests/s", target=60_000, baseline=140_000.0) is True
    line = json.loads(capsys.readouterr().out)
    assert line == {
        "name": "dispatch",
        "value": 70_000.0,
        "unit": "requests/s",
        "target": 60_000,
        "met": True,
        "baseline": 140_000.0,
        "ratio": 0.5,
    }


def test_a_time_over_its_target_is_missed():
    assert report("routing", 250.0, "us", target=200, aim="at_most") is False


def test_without_a_target_nothing_is_met_or_missed():
    assert report("memory", 12.0, "MiB") is None


def test_what_could_not_be_measured_misses_its_target():
    assert report("peer", None, "s", target=1, aim="at_most") is False
