"""What none of the published systems has, and how far conclusions depend on the coefficients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.simulator.experiments.other_loads import open_spec
from workers.simulator.experiments.runs import RunSpec
from workers.simulator.experiments.shapes import COMMON_NOTE, Claim, Experiment, Figures, Line, Scope, rows

PREFETCH_NOTE = (
    "Fetching ahead is off by default: the node that would be chosen while a request waits is often not the one that is chosen "
    "in the end, so contexts are copied that nobody reads there, and they keep the links busy. Without it a fetch begins in the "
    "engine's own queue, and most of its time is hidden there already."
)


def guards(scope: Scope) -> Experiment:
    lines, claims = [], []
    theirs = {row["rate"]: row["ours_ttft95"] for row in rows("table6_open_loop_arrivals_cc")}
    for rate in (0.5, 0.75, 1.0):
        for name in ("published-rules", "switchyard"):
            spec, case = open_spec(scope, name, rate), f"{rate}/min {name}"
            lines += [
                Line(case, "P95 TTFT", spec, "ttft_p95_s", theirs[rate] if name == "published-rules" else None, "s"),
                Line(case, "switches", spec, "switches_all", None, "nodes"),
                Line(case, "rolled back", spec, "rollbacks", None, "switches"),
            ]
        claims.append(
            Claim(f"{rate}/min: P95 TTFT over the 15 s target", (f"{rate}/min switchyard", "P95 TTFT"), ("", "15"), 1.0, "at_most")
        )  # fmt: skip
    return Experiment(
        "guards", "TTFT guard and rollback on random arrivals", tuple(lines), tuple(claims), (COMMON_NOTE,)
    )


def no_signals(scope: Scope) -> Experiment:
    lines = []
    cases = {
        "full signals": scope.spec("switchyard", "CC", 126),
        "no signals": scope.spec("switchyard", "CC", 126, harness_signals=False),
        "static:4P5D": scope.spec("static:4P5D", "CC", 126),
    }
    for case, spec in cases.items():
        lines += [
            Line(case, "throughput", spec, "throughput_rps", None, "req/s"),
            Line(case, "lost reuse", spec, "lost_reuse_pct", None, "%"),
            Line(case, "P95 TTFT", spec, "ttft_p95_s", None, "s"),
        ]
    claim = Claim("throughput kept without signals", ("no signals", "throughput"), ("full signals", "throughput"), 0.9)
    return Experiment(
        "no-signals", "Branches inferred without a harness's signals", tuple(lines), (claim,), (COMMON_NOTE,)
    )


def prefetch(scope: Scope) -> Experiment:
    """With three prefill nodes at CC 126 requests wait in the central queue; with four hardly any do."""
    lines, claims = [], []
    for split in ("3P6D", "4P5D"):
        for name in ("switchyard-fixed", "switchyard+prefetch"):
            spec, case = scope.spec(f"{name}:{split}", "CC", 126), f"{split} {name}"
            lines += [
                Line(case, "throughput", spec, "throughput_rps", None, "req/s"),
                Line(case, "mean TTFT", spec, "ttft_mean_s", None, "s"),
                Line(case, "P95 TTFT", spec, "ttft_p95_s", None, "s"),
                Line(case, "fetched ahead", spec, "prefetches", None, "times"),
            ]
        claims.append(
            Claim(f"{split}: mean TTFT without over with", (f"{split} switchyard-fixed", "mean TTFT"), (f"{split} switchyard+prefetch", "mean TTFT"), 1.0)
        )  # fmt: skip
    return Experiment(
        "prefetch", "Contexts brought ahead for requests in the central queue", tuple(lines), tuple(claims), (COMMON_NOTE, PREFETCH_NOTE)
    )  # fmt: skip


TIERS = (("gold", "premium", 0.2), ("silver", "standard", 0.3), ("bulk", "best-effort", 0.5))
SHEDDING = '{"max_requests": 40}'


def bands(scope: Scope) -> Experiment:
    """Premium's place under overload: by its band, by taking turns in one band, and first come, first served."""
    lines, alike = [], tuple((tenant, "standard", share) for tenant, _, share in TIERS)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bands", {"tenants": TIERS}),
        ("turns in one band", {"tenants": alike}),
        ("first come, first served", {"tenants": alike, "fairness": "global-strict"}),
    )
    for case, changes in cases:
        spec = scope.spec("switchyard-fixed:2P7D", "CC", 126, flow=SHEDDING, **changes)
        for tenant, _, _ in TIERS:
            lines.append(Line(f"{case}: {tenant}", "P95 TTFT", spec, _of_tenant(tenant, "ttft_p95_s"), None, "s"))
            lines.append(Line(f"{case}: {tenant}", "requests", spec, _of_tenant(tenant, "requests"), None, ""))
        lines.append(Line(case, "refused", spec, lambda f: float(sum(f["refused"].values())), None, "times"))
    gold = ("bands: gold", "P95 TTFT")
    claims = (
        Claim("premium's P95 TTFT first come, first served over with bands", (f"{cases[2][0]}: gold", "P95 TTFT"), gold, 2.0),
        Claim("premium's P95 TTFT taking turns over with bands", (f"{cases[1][0]}: gold", "P95 TTFT"), gold, 1.0),
    )  # fmt: skip
    note = (
        "Overload: two prefill nodes where three are needed; 40 requests may wait. Gold sends a fifth of the work and silver "
        "three tenths, so turns alone already give gold more than it asks for; what bands add is that it is not refused."
    )
    return Experiment("bands", "Tenants' bands under overload", tuple(lines), claims, (COMMON_NOTE, note))


def _of_tenant(tenant: str, figure: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures["tenants"][tenant][figure])


def fairness(scope: Scope) -> Experiment:
    """Two tenants with as many agents; one's requests are far larger."""
    lines = []
    mix = ((0.0, (("CC", 90), ("Putnam", 90))),)
    for policy in ("round-robin", "token-fair"):
        spec = RunSpec(
            "switchyard-fixed:2P7D", mix, warm_up_s=scope.warm_up_s, scored_s=scope.scored_s, fairness=policy,
            tenants=(("one", "standard", 0.5), ("other", "standard", 0.5)),
        )  # fmt: skip
        lines += [
            Line(f"{policy}: {tenant}", figure, spec, _of_tenant(tenant, key), None, unit)
            for tenant in ("one", "other")
            for figure, key, unit in (("P95 TTFT", "ttft_p95_s", "s"), ("requests", "requests", ""))
        ]
    return Experiment("fairness", "Token-fair beside round-robin", tuple(lines), (), (COMMON_NOTE,))


def sensitivity(scope: Scope) -> Experiment:
    """Every conclusion at CC 108 with coefficients 15 % off, and with a planner that believes what is not so."""
    lines, claims = [], []
    cases: list[tuple[str, dict[str, Any]]] = [("as inferred", {})]
    for name in ("prefill", "decode"):
        for factor in (0.85, 1.15):
            cases.append((f"{name} x{factor}", {"scaled": ((name, factor),)}))
            cases.append((f"{name} x{factor}, not known", {"scaled": ((name, factor),), "believes_unscaled": True}))
    for case, changes in cases:
        for name in ("static:4P5D", "switchyard"):
            spec = scope.spec(name, "CC", 108, **changes)
            lines.append(Line(f"{case} {name}", "throughput", spec, "throughput_rps", None, "req/s"))
            lines.append(Line(f"{case} {name}", "mean E2E", spec, "e2e_mean_s", None, "s"))
            if name == "switchyard":
                lines.append(
                    Line(
                        f"{case} {name}",
                        "prefill nodes",
                        spec,
                        lambda f: float(f["final_split"].split("P")[0]),
                        None,
                        "nodes",
                    )
                )
        claims.append(
            Claim(f"{case}: throughput over the best published static split", (f"{case} switchyard", "throughput"), (f"{case} static:4P5D", "throughput"), 1.0)
        )  # fmt: skip
    return Experiment("sensitivity", "Coefficients 15 % off", tuple(lines), tuple(claims), (COMMON_NOTE,))
