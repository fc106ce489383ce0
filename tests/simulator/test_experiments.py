"""Experiments: every published figure has its place, runs are kept, missed demands stay visible."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from workers.simulator.experiments.making import kept
from workers.simulator.experiments.registry import EXPERIMENTS
from workers.simulator.experiments.report import evaluate, markdown, page, write
from workers.simulator.experiments.runs import Cancelled, RunSpec, Store, make_all, stationary
from workers.simulator.experiments.shapes import FULL, QUICK, Claim, Experiment, Line, Scope, published, with_seeds

TINY = stationary("switchyard", "Putnam", 4, warm_up_s=10.0, scored_s=60.0, nodes=2, prefill_nodes=1)


def test_every_experiment_can_be_described_and_has_a_published_figure_or_a_demand() -> None:
    for name, make in EXPERIMENTS.items():
        experiment = make(QUICK)
        assert experiment.name == name
        assert experiment.lines
        assert all(line.spec.key for line in experiment.lines)


def test_every_published_table_has_its_experiment() -> None:
    """Figures of all tables appear among the lines."""
    shown = {
        line.published for make in EXPERIMENTS.values() for line in make(QUICK).lines if line.published is not None
    }
    for table, column in (
        ("table1_switches_and_lost_reuse", "ours_lost"), ("table2_prefill_queueing_cc", "ours_queue_s"),
        ("table3_stationary", "ours_x"), ("table4_shifting_composition", "ours"), ("table5_best_static", "x"),
        ("table6_open_loop_arrivals_cc", "ours_ttft95"), ("table8_cc126_fixed_4P5D", "ours"),
    ):  # fmt: skip
        found = published()[table]
        place = found["columns"].index(column)
        assert {row[place] for row in found["rows"]} <= shown, table


def test_the_same_work_is_given_to_every_system() -> None:
    one, other = (stationary(name, "CC", 90) for name in ("switchyard", "dynamo"))
    assert replace(one, system="x") == replace(other, system="x")
    assert one.key != other.key


def test_runs_are_made_once_and_their_figures_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    told: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> bool:
        told.append((done, of))
        return True

    make_all([TINY], store, 1, progress)
    figures = store.get(TINY)
    assert figures is not None and figures["requests"] > 5
    before = store.path(TINY).stat().st_mtime_ns
    make_all([TINY], store, 1, progress)
    assert store.path(TINY).stat().st_mtime_ns == before
    assert told[-1] == (1, 1)
    with pytest.raises(Cancelled):
        make_all([replace(TINY, seed=9)], store, 1, lambda done, of: False)


def stored(tmp_path: Path, values: dict[RunSpec, dict[str, Any]]) -> Store:
    store = Store(tmp_path)
    for spec, figures in values.items():
        store.put(spec, figures)
    return store


def experiment() -> Experiment:
    ours, theirs = stationary("switchyard", "CC", 90), stationary("dynamo", "CC", 90)
    lines = (
        Line("ours", "throughput", ours, "throughput_rps", 5.4, "req/s"),
        Line("theirs", "throughput", theirs, "throughput_rps", 2.48, "req/s"),
        Line("theirs", "lost reuse", theirs, "lost_reuse_pct", None, "%"),
    )
    claims = (
        Claim("twice", ("ours", "throughput"), ("theirs", "throughput"), 2.0),
        Claim("lower by", ("ours", "throughput"), ("theirs", "lost reuse"), 10.0, as_lower_pct=True),
    )
    return Experiment("example", "An example", lines, claims, ("a note",))


def test_lines_carry_mean_spread_published_and_ratio_and_missed_demands_stay(tmp_path: Path) -> None:
    made = experiment()
    ours, theirs = made.lines[0].spec, made.lines[1].spec
    values: dict[RunSpec, dict[str, Any]] = {}
    for seed in (1, 2):
        values[replace(ours, seed=seed)] = {"throughput_rps": 5.0 + seed}
        values[replace(theirs, seed=seed)] = {"throughput_rps": 4.0, "lost_reuse_pct": 8.0}
    report = evaluate(made, stored(tmp_path, values), (1, 2))
    first = report.found[0]
    assert (first.value, first.seeds) == (6.5, 2)
    assert first.spread == pytest.approx(0.7071, rel=1e-3)
    assert first.ratio == pytest.approx(6.5 / 5.4)
    assert [verdict.met for verdict in report.verdicts] == [False, True]
    text = markdown(report)
    assert "**missed**" in text and "| 5.4 |" in text and "a note" in text
    assert "plotly" in page(report).lower()
    written = write(report, tmp_path / "out")
    assert [path.suffix for path in written] == [".json", ".md", ".html"]
    assert json.loads(written[0].read_text())["verdicts"][0]["met"] is False


def test_what_was_not_run_is_said_to_be_not_run(tmp_path: Path) -> None:
    report = evaluate(experiment(), Store(tmp_path), (1,))
    assert all(line.value is None for line in report.found)
    assert "not run" in markdown(report)


def test_a_figure_that_no_run_has_is_not_one_that_was_not_run(tmp_path: Path) -> None:
    made = experiment()
    ours, theirs = made.lines[0].spec, made.lines[1].spec
    values: dict[RunSpec, dict[str, Any]] = {theirs: {"throughput_rps": 4.0, "lost_reuse_pct": None}}
    store = stored(tmp_path, values)
    assert "1 of 3 figures were not run" in markdown(evaluate(made, store, (1,)))
    store.put(ours, {"throughput_rps": 5.0})
    assert "not run." not in markdown(evaluate(made, store, (1,)))


def test_the_full_runs_are_told_where_all_of_them_were_made_and_the_quick_ones_until_then(tmp_path: Path) -> None:
    figures: dict[str, Any] = {"throughput_rps": 1.0, "ttft_p95_s": 1.0, "e2e_mean_s": 1.0, "lost_reuse_pct": 1.0}
    store = Store(tmp_path / "runs")
    for spec in with_seeds(EXPERIMENTS["components"](QUICK), QUICK.seeds):
        store.put(spec, figures)
    full = with_seeds(EXPERIMENTS["components"](FULL), FULL.seeds)
    for spec in full[:-1]:
        store.put(spec, figures)
    quick = kept("components", tmp_path)
    assert quick is not None and quick.configuration["seeds"] == [1]
    store.put(full[-1], figures)
    whole = kept("components", tmp_path)
    assert whole is not None and whole.configuration["seeds"] == [1, 2, 3]
    asked = kept("components", tmp_path, quick=True)
    assert asked is not None and asked.configuration["seeds"] == [1]


def test_the_command_names_what_it_knows(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="expected one of stationary"):
        call_command("experiment", "nothing")
    with pytest.raises(CommandError, match="--seeds"):
        call_command("experiment", "guards", "--seeds", "0")
    call_command("experiment", "guards", "--quick", "--no-runs", "--out", str(tmp_path))
    assert (tmp_path / "guards.html").exists()


def test_seeds_multiply_the_runs() -> None:
    made = EXPERIMENTS["fixed-4P5D"](Scope())
    assert len(with_seeds(made, (1, 2, 3))) == 9


def test_simulate_prints_figures_and_refuses_by_option(capsys: Any) -> None:
    call_command(
        "simulate",
        "--workload",
        "Putnam",
        "--agents",
        "4",
        "--nodes",
        "2",
        "--prefill-nodes",
        "1",
        "--warm-up",
        "5",
        "--seconds",
        "30",
    )
    assert json.loads(capsys.readouterr().out)["throughput_rps"] > 0
    call_command("simulate", "--workload", "Putnam", "--describe")
    assert "ideal_hit_pct" in capsys.readouterr().out
    for wrong, field in (
        ({"workload": "chess"}, "--workload"),
        ({"system": "nobody"}, "system"),
        ({"workload": "azure"}, "--file"),
        ({"prefill_nodes": 9}, "--prefill-nodes"),
    ):
        with pytest.raises(CommandError, match=field):
            call_command("simulate", **wrong)
