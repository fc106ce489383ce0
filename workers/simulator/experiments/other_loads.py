"""The other published tables: loads that shift or arrive, fixed splits, components, starts, larger clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.simulator.experiments.runs import RunSpec
from workers.simulator.experiments.shapes import (
    COMMON_NOTE,
    FULL,
    Claim,
    Experiment,
    Figures,
    Line,
    Scope,
    published,
    rows,
)
from workers.simulator.experiments.stationary_load import SPLIT_NOTE
from workers.simulator.hardware import KIMI

SHIFTING_NOTE = (
    "A decision takes ten minutes of windows; the quick run's periods of a quarter of an hour show that four times as strongly "
    "as the published hours."
)
OPEN_NOTE = (
    "At these rates prefill hardly queues here, so the best static split and ours both stay far under the 15 s that the planner "
    "holds to; it gives a prefill node to decode, which costs P95 TTFT and brings a shorter E2E."
)


def shifting(scope: Scope) -> Experiment:
    hour = 3600.0 if scope is FULL else 900.0
    mix = (
        (0.0, (("Putnam", 288),)),
        (hour, (("Putnam", 144), ("OSWorld", 72))),
        (2 * hour, (("OSWorld", 144),)),
    )
    lines = []
    columns = {"dynamo": "dynamo", "static:5P4D": "best_static_5P4D", "switchyard": "ours"}
    table = published()["table4_shifting_composition"]
    for name, column in columns.items():
        spec = RunSpec(name, mix, hardware=KIMI, warm_up_s=0.0, scored_s=3 * hour)
        for index, row in enumerate(rows("table4_shifting_composition")):
            read: Any = "throughput_rps" if row["period"] == "Whole run" else _period(index)
            lines.append(Line(f"{row['period']} {name}", "throughput", spec, read, row[column], "req/s"))
        lines += [
            Line(f"Whole run {name}", "mean E2E", spec, "e2e_mean_s", table["mean_e2e_s"][column], "s"),
            Line(f"Whole run {name}", "P95 TTFT", spec, "ttft_p95_s", table["p95_ttft_s"][column], "s"),
        ]
    claims = (
        Claim("whole run: throughput over the best static split", ("Whole run switchyard", "throughput"), ("Whole run static:5P4D", "throughput"), 1.0),
        Claim("whole run: throughput over dynamo", ("Whole run switchyard", "throughput"), ("Whole run dynamo", "throughput"), 1.0),
    )  # fmt: skip
    return Experiment("shifting", "Shifting composition, Kimi K2.6", tuple(lines), claims, (COMMON_NOTE, SHIFTING_NOTE))


def _period(index: int) -> Callable[[Figures], float]:
    return lambda figures: float(figures["periods_rps"][index])


def best_static(scope: Scope) -> Experiment:
    lines = []
    for row in rows("table5_best_static"):
        name = f"{'static' if row['system'] == 'SGLang' else 'switchyard-fixed'}:{row['split']}"
        spec, case = scope.spec(name, row["workload"], row["agents"]), f"{row['workload']} {row['agents']} {name}"
        lines += [
            Line(case, "throughput", spec, "throughput_rps", row["x"], "req/s"),
            Line(case, "mean TTFT", spec, "ttft_mean_s", row["ttft_mean"], "s"),
            Line(case, "P95 TTFT", spec, "ttft_p95_s", row["ttft_p95"], "s"),
            Line(case, "mean E2E", spec, "e2e_mean_s", row["e2e_mean"], "s"),
        ]
    return Experiment("best-static", "Each system at its own best static split", tuple(lines), (), (COMMON_NOTE,))


OPEN_RATES = (0.5, 0.75, 1.0, 1.25, 1.5)


def open_spec(scope: Scope, name: str, rate: float, **changes: Any) -> RunSpec:
    """Arrivals into an empty cluster: the whole of two hours counts, as published."""
    seconds = 7200.0 if scope is FULL else 3600.0
    return RunSpec(name, ((0.0, (("CC", 0),)),), warm_up_s=0.0, scored_s=seconds, arrivals_per_minute=rate, **changes)


def open_loop(scope: Scope) -> Experiment:
    lines, claims = [], []
    for row in rows("table6_open_loop_arrivals_cc"):
        for name, short in (("switchyard", "ours"), ("static:4P5D", "s"), ("dynamo", "dyn")):
            spec, case = open_spec(scope, name, row["rate"]), f"{row['rate']}/min {name}"
            lines += [
                Line(case, "P50 TTFT", spec, "ttft_p50_s", row[f"{short}_ttft50"], "s"),
                Line(case, "P95 TTFT", spec, "ttft_p95_s", row[f"{short}_ttft95"], "s"),
                Line(case, "P50 E2E", spec, "e2e_p50_s", row[f"{short}_e2e50"], "s"),
            ]
        claims.append(
            Claim(f"{row['rate']}/min: P95 TTFT of the best static split over ours", (f"{row['rate']}/min static:4P5D", "P95 TTFT"), (f"{row['rate']}/min switchyard", "P95 TTFT"), 1.0)
        )  # fmt: skip
    return Experiment("open-loop", "Agents arrive at random, CC", tuple(lines), tuple(claims), (COMMON_NOTE, OPEN_NOTE))


def fixed_split(scope: Scope) -> Experiment:
    names = {"cache_aware": "cache-aware:4P5D", "thunderagent": "thunderagent:4P5D", "ours": "switchyard-fixed:4P5D"}
    figures = {
        "throughput_rps": "throughput_rps", "ttft_mean_s": "ttft_mean_s", "ttft_p95_s": "ttft_p95_s",
        "e2e_mean_s": "e2e_mean_s", "e2e_p95_s": "e2e_p95_s", "tpot_ms": "tpot_ms", "kv_hit_pct": "kv_hit_pct",
        "kv_hit_ideal_pct": "kv_hit_ideal_pct", "lost_reuse_pct": "lost_reuse_pct",
        "uncached_prompt_tokens_per_request": "uncached_tokens",
    }  # fmt: skip
    lines = []
    for row in rows("table8_cc126_fixed_4P5D"):
        for column, name in names.items():
            spec = scope.spec(name, "CC", 126)
            lines.append(Line(name, row["metric"], spec, figures[row["metric"]], row[column]))
    claims = (
        Claim("throughput over cache-aware", ("switchyard-fixed:4P5D", "throughput_rps"), ("cache-aware:4P5D", "throughput_rps"), 1.2),
    )  # fmt: skip
    note = (
        "The baselines cache prefixes on the device alone and lose waiting branches to LRU there, as published, but more of "
        "them: the device's 5 million tokens a node are a guess."
    )
    return Experiment("fixed-4P5D", "CC 126 at a fixed 4P5D", tuple(lines), claims, (COMMON_NOTE, note))


def components(scope: Scope) -> Experiment:
    table = published()["components_cc126_4P5D"]
    plane = published()["data_plane_only_cc126_4P5D"]
    steps = (
        ("static:4P5D", table["best_static_sglang"]),
        ("data-plane:4P5D", plane["async_fetch"]["x"]),
        ("data-plane+eviction:4P5D", None),
        ("data-plane+eviction+routing:4P5D", table["plus_decoupled_data_plane_and_reuse_aware_eviction_routing"]),
        ("switchyard:4P5D", table["plus_online_split_adaptation"]),
    )
    lines = []
    for name, theirs in steps:
        spec = scope.spec(name, "CC", 126)
        lines += [
            Line(name, "throughput", spec, "throughput_rps", theirs, "req/s"),
            Line(name, "P95 TTFT", spec, "ttft_p95_s", None, "s"),
            Line(name, "lost reuse", spec, "lost_reuse_pct", None, "%"),
        ]
    return Experiment("components", "One step at a time, CC 126 at 4P5D", tuple(lines), (), (COMMON_NOTE,))


def initial_split(scope: Scope) -> Experiment:
    starts = published()["scale"]["initial_split_sensitivity_cc126"]["starts"]
    lines = []
    for split in starts:
        spec = scope.spec(f"switchyard:{split}", "CC", 126)
        lines += [
            Line(split, "mean E2E", spec, "e2e_mean_s", None, "s"),
            Line(split, "final prefill nodes", spec, lambda f: float(f["final_split"].split("P")[0]), None, "nodes"),
        ]
    return Experiment("initial-split", "From which split it starts, CC 126", tuple(lines), (), (COMMON_NOTE,))


def adaptation_cost(scope: Scope) -> Experiment:
    lines = [
        Line(name, "throughput", scope.spec(name, "CC", 126), "throughput_rps", None, "req/s")
        for name in ("switchyard-fixed:4P5D", "switchyard:4P5D")
    ]
    claim = Claim(
        "throughput kept while adapting",
        ("switchyard:4P5D", "throughput"),
        ("switchyard-fixed:4P5D", "throughput"),
        0.99,
    )
    return Experiment(
        "adaptation-cost",
        "What adapting costs where nothing is to be adapted",
        tuple(lines),
        (claim,),
        (COMMON_NOTE, SPLIT_NOTE),
    )


def motivation(scope: Scope) -> Experiment:
    table = published()["profiling_motivation_cc90"]
    lines = []
    for name, column in (
        ("cache-aware:4P5D", "cache_aware"), ("sticky:4P5D", "sticky"), ("kv-router:4P5D", "kv_router"),
        ("kv-router+pool:4P5D", "kv_router_with_pool"),
    ):  # fmt: skip
        spec = scope.spec(name, "CC", 90)
        lines += [
            Line(name, "P95 TTFT", spec, "ttft_p95_s", table["p95_ttft_s"][column], "s"),
            Line(name, "mean E2E", spec, "e2e_mean_s", table["mean_e2e_s"][column], "s"),
        ]
    arrow = scope.spec("arrow", "CC", 90)
    lines += [
        Line("arrow", "switches", arrow, "switches_all", table["arrow_switches"], "nodes"),
        Line("arrow", "lost to switching", arrow, lambda f: f["lost_pct_by_cause"]["switched"], table["lost_reuse_from_switching_pct"]["arrow"], "%"),
        Line("arrow", "throughput", arrow, "throughput_rps", 4.9 * (1 - table["throughput_below_best_static_pct"]["arrow"] / 100), "req/s"),
    ]  # fmt: skip
    return Experiment("motivation", "What others do at CC 90", tuple(lines), (), (COMMON_NOTE,))


def tp8(scope: Scope) -> Experiment:
    """Six nodes of eight GPUs. Their coefficients are not published: prefill twice as fast, decode as it is."""
    table = published()["table7_tp8_prefill_adp8_decode"]
    lines = []
    for name, theirs in (
        ("static:2P4D", table["best_static"]),
        ("dynamo", table["dynamo"]),
        ("switchyard", table["ours"]),
    ):
        spec = scope.spec(name, "CC", 90, nodes=6, prefill_nodes=4, scaled=(("prefill", 0.5),))
        lines += [
            Line(name, "mean E2E", spec, "e2e_mean_s", theirs["e2e"], "s"),
            Line(name, "switch time", spec, "switch_mean_s", theirs.get("switch_s"), "s"),
        ]
    return Experiment("tp8-adp8", "TP8 prefill, ADP8 decode (assumed coefficients)", tuple(lines), (), (COMMON_NOTE,))


def scale_256(scope: Scope) -> Experiment:
    table = published()["scale"]["real_256_gpu"]
    big = {"nodes": 64, "prefill_nodes": 43}
    lines = []
    for label, agents, changes, theirs in (("36 GPUs", 90, {}, "36gpu"), ("256 GPUs", 640, big, "")):
        for name, column in (("static", "fixed"), ("switchyard", "ours")):
            key = f"{column}_{theirs}" if theirs else f"{column}_p95_ttft_s"
            spec = scope.spec(name, "CC", agents, **changes)
            lines.append(Line(f"{label} {name}", "P95 TTFT", spec, "ttft_p95_s", table[key], "s"))
            lines.append(Line(f"{label} {name}", "mean E2E", spec, "e2e_mean_s", None, "s"))
    return Experiment("scale-256", "From 36 to 256 GPUs", tuple(lines), (), (COMMON_NOTE,))
