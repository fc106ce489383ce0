"""What an experiment found: evaluated lines and claims, as JSON, as a table, and as a page with a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import plotly.graph_objects as go

from workers.simulator.experiments.runs import Store
from workers.simulator.experiments.shapes import Claim, Experiment, Line

HEADINGS = ("case", "figure", "ours", "spread", "published", "ratio")


@dataclass(frozen=True, slots=True)
class Found:
    """One line: the mean over seeds, their standard deviation, the publication's figure, ours over theirs. `seeds`: how many
    runs were made; a figure that none of them has (the time of a switch where nothing switched) has no value all the same."""

    case: str
    figure: str
    unit: str
    value: float | None
    spread: float | None
    published: float | None
    ratio: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    value: float | None
    target: float
    aim: str
    met: bool | None


@dataclass(frozen=True)
class Report:
    name: str
    title: str
    found: tuple[Found, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    configuration: dict[str, Any]


def evaluate(experiment: Experiment, store: Store, seeds: Sequence[int]) -> Report:
    """Everything that the runs in the store say. A line whose runs are missing has no value."""
    found = tuple(_line(line, store, seeds) for line in experiment.lines)
    by_name = {(line.case, line.figure): line.value for line in found}
    verdicts = tuple(_claim(claim, by_name) for claim in experiment.claims)
    first = experiment.lines[0].spec
    configuration = {"seeds": list(seeds), "warm_up_s": first.warm_up_s, "scored_s": first.scored_s,
                     "runs": sorted({line.spec.key for line in experiment.lines}), **experiment.configuration}  # fmt: skip
    return Report(experiment.name, experiment.title, found, verdicts, experiment.notes, configuration)


def _line(line: Line, store: Store, seeds: Sequence[int]) -> Found:
    runs = [figures for seed in seeds if (figures := store.get(replace(line.spec, seed=seed))) is not None]
    read = [figures[line.read] if isinstance(line.read, str) else line.read(figures) for figures in runs]
    values = [float(value) for value in read if value is not None]
    value = mean(values) if values else None
    spread = stdev(values) if len(values) > 1 else None
    ratio = value / line.published if value is not None and line.published else None
    return Found(line.case, line.figure, line.unit, value, spread, line.published, ratio, len(runs))


def _claim(claim: Claim, values: dict[tuple[str, str], float | None]) -> Verdict:
    over = values.get(claim.over)
    under = float(claim.under[1]) if not claim.under[0] else values.get(claim.under)
    value: float | None = None
    if over is not None and under is not None:
        if claim.as_lower_pct:
            value = 100 * (1 - over / under) if under else None
        else:
            value = over / under if under else None
    met = None if value is None else (value >= claim.target if claim.aim == "at_least" else value <= claim.target)
    return Verdict(claim.text, value, claim.target, claim.aim, met)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(report: Report) -> list[tuple[str, ...]]:
    """Rows of text under `HEADINGS`."""
    return [
        (
            line.case,
            f"{line.figure} ({line.unit})" if line.unit else line.figure,
            number(line.value),
            "-" if line.spread is None else f"+-{number(line.spread)}",
            number(line.published),
            number(line.ratio),
        )
        for line in report.found
    ]


def markdown(report: Report) -> str:
    """The experiment as a section of a document."""
    lines = [f"### {report.title}", "", _markdown_row(HEADINGS), _markdown_row(["---"] * len(HEADINGS))]
    run = [row for row, line in zip(table(report), report.found, strict=True) if line.seeds]
    lines += [_markdown_row(row) for row in run]
    if len(run) < len(report.found):
        lines += ["", f"{len(report.found) - len(run)} of {len(report.found)} figures were not run."]
    if report.verdicts:
        lines += ["", "| demanded | found | target | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {v.text} | {number(v.value)} | {'>=' if v.aim == 'at_least' else '<='} {number(v.target)} | {said(v)} |"
            for v in report.verdicts
        ]
    lines += ["", *(f"{note}" for note in report.notes), ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def said(verdict: Verdict) -> str:
    return "not run" if verdict.met is None else "met" if verdict.met else "**missed**"


def page(report: Report) -> str:
    """A page of its own: ours beside the published figure for every line, and the table."""
    figure = go.Figure()
    for name in dict.fromkeys(line.figure for line in report.found):
        lines = [line for line in report.found if line.figure == name]
        cases = [line.case for line in lines]
        shown = True if name == report.found[0].figure else "legendonly"
        error = {"type": "data", "array": [line.spread or 0.0 for line in lines]}
        figure.add_bar(name=f"{name}, ours", x=cases, y=[line.value for line in lines], error_y=error, visible=shown)
        if any(line.published is not None for line in lines):
            figure.add_bar(name=f"{name}, published", x=cases, y=[line.published for line in lines], visible=shown)
    figure.update_layout(title=report.title, barmode="group", template="plotly_white", height=560)
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in table(report))
    claims = "".join(
        f"<li>{v.text}: {number(v.value)} (target {number(v.target)}): {said(v).strip('*')}</li>"
        for v in report.verdicts
    )
    notes = "".join(f"<p>{note}</p>" for note in report.notes)
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{report.title}</title>"
        "<style>body{font-family:system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:left}</style>"
        f"<h1>{report.title}</h1>{plot}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<ul>{claims}</ul>{notes}<pre>{json.dumps(report.configuration, indent=1)}</pre></html>"
    )


def write(report: Report, folder: Path) -> list[Path]:
    """`NAME.json`, `NAME.md` and `NAME.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(asdict(report), indent=1), "md": markdown(report), "html": page(report)}
    written = []
    for ending, text in texts.items():
        path = folder / f"{report.name}.{ending}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def read(path: Path) -> Report | None:
    """A report that was written before; None where there is none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Report(
        kept["name"],
        kept["title"],
        tuple(Found(**line) for line in kept["found"]),
        tuple(Verdict(**verdict) for verdict in kept["verdicts"]),
        tuple(kept["notes"]),
        kept["configuration"],
    )


# ---- the document and the README's table --------------------------------------------------------------------------------

BEGIN, END = "<!-- experiments: generated by manage.py experiment all --document -->", "<!-- experiments: end -->"


def document(reports: Sequence[Report], root: Path) -> list[Path]:
    """Write every table to docs/experiments.md, and what was demanded to the README between its marks."""
    run = [report for report in reports if any(line.value is not None for line in report.found)]
    text = [
        "# Experiments",
        "",
        "Generated by `manage.py experiment all --document`. Ours are means over the seeds named below each table, with their "
        "standard deviation.",
        "",
    ]
    for report in run:
        text += [markdown(report), f"Measured with {_period(report)}.", ""]
    missing = [report.title for report in reports if report not in run]
    if missing:
        text += [f"Not run: {'; '.join(missing)}.", ""]
    tables = root / "docs" / "experiments.md"
    tables.write_text("\n".join(text), encoding="utf-8")
    readme = root / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{demanded(run)}\n{END}{after}", encoding="utf-8")
    return [tables, readme]


def demanded(reports: Sequence[Report]) -> str:
    """Every demand with what was found; the missed ones with their reason."""
    rows = ["| demanded | target | found | |", "| --- | --- | --- | --- |"]
    missed: dict[str, None] = {}
    for report in reports:
        for verdict in report.verdicts:
            if verdict.met is None:
                continue
            sign = ">=" if verdict.aim == "at_least" else "<="
            unit = " %" if "lower than" in verdict.text else "x"
            rows.append(
                f"| {verdict.text} | {sign} {number(verdict.target)}{unit} | {number(verdict.value)}{unit} | {said(verdict)} |"
            )
            if verdict.met is False:
                missed.update(dict.fromkeys(report.notes))
    told = "Seeds and periods of each are in [docs/experiments.md](docs/experiments.md)."
    return "\n".join([*rows, "", *(f"- {note}" for note in missed), "", told, ""])


def _period(report: Report) -> str:
    made = report.configuration
    if "seeds" not in made:
        return f"seed {made['seed']}"
    seeds = f"seed {made['seeds'][0]}" if len(made["seeds"]) == 1 else f"seeds {', '.join(map(str, made['seeds']))}"
    return f"{seeds}; {made['warm_up_s']:g} s of warm-up, {made['scored_s']:g} s scored"
