"""Tables of a benchmark for the terminal, and its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kfc.lab.report.figures import Figure, Json, layout, line
from kfc.lab.report.rendering import write_html
from kfc.lab.report.tables import Row, number, ratio
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.results import Results, Ruleset
from kfc.lab.suite.scoring import LARGEST_RATIO, of_method, profile_steps
from kfc.lab.suite.store import Record

LARGEST_GROWTH = 1.2  # of the loss of our own methods at their defaults
UNREACHED = "not reached"
TITLES = {"untuned": "Untuned", "tuned": "Tuned"}


def ordered_methods(ruleset: Ruleset, methods: Sequence[str]) -> list[str]:
    """Return the methods from the best score to the worst."""
    return sorted(methods, key=lambda method: (-ruleset.score(method), ruleset.mean_ratio(method)))


def score_rows(results: Results, ruleset: Ruleset) -> list[Row]:
    """Return a table with a row for each method: score, mean ratio, first places, targets."""
    rows: list[Row] = [
        ("method", "score", "geometric mean of ratios", "fastest on", "targets reached")
    ]
    count = len(ruleset.times)
    for method in ordered_methods(ruleset, results.settings.methods):
        mean = ruleset.mean_ratio(method)
        bound = "≥ " if ruleset.is_bound(method) else ""
        firsts = sum(value == 1 for value in of_method(ruleset.ratios, method))
        mean_text = f"{bound}{mean:.2f}" if math.isfinite(mean) else UNREACHED
        reached = f"{ruleset.reached(method)} of {count}"
        rows.append((method, f"{ruleset.score(method):.3f}", mean_text, str(firsts), reached))
    return rows


def time_rows(results: Results, ruleset: Ruleset, *, brief: bool = False) -> list[Row]:
    """Return a table of seconds to the target, with ratios to the fastest in brackets.

    Args:
        brief: whether to make the table narrow enough for a terminal.
    """
    methods = results.settings.methods
    unreached = "∞" if brief else UNREACHED
    rows: list[Row] = [("workload", *(() if brief else ("target", "limit")), *methods)]
    for workload in results.workloads:
        if workload.name not in ruleset.times:
            continue
        times, ratios = ruleset.times[workload.name], ruleset.ratios[workload.name]
        cells = [
            f"{number(times[method])} ({ratio(ratios[method])})"
            if math.isfinite(times[method])
            else unreached
            for method in methods
        ]
        title = (workload.title, workload.goal, number(workload.seconds))
        rows.append((*((workload.name,) if brief else title), *cells))
    return rows


def growth_rows(results: Results, ruleset: Ruleset) -> list[Row]:
    """Return the largest loss of a batch relative to the first, over seeds, for chosen runs."""

    def cell(records: Sequence[Record]) -> str:
        growth = max(record.outcome.loss_growth for record in records)
        return f"{growth:.2f}" if math.isfinite(growth) else "diverged"

    return _chosen_rows(results, ruleset, cell)


def final_test_rows(results: Results, ruleset: Ruleset) -> list[Row]:
    """Return the error or loss on the whole test split at the end of chosen runs, over seeds."""
    losses = {each.name for each in results.workloads if each.metric.endswith("loss")}

    def cell(records: Sequence[Record]) -> str:
        value = median(record.outcome.test for record in records)
        unit = "" if records[0].entry.workload in losses else "%"
        return number(value) + unit if math.isfinite(value) else "-"

    return _chosen_rows(results, ruleset, cell)


def setting_rows(results: Results, ruleset: Ruleset) -> list[Row]:
    """Return the setting that each method's result comes from."""
    return _chosen_rows(results, ruleset, lambda records: str(records[0].entry.setting))


def _chosen_rows(
    results: Results, ruleset: Ruleset, cell: Callable[[Sequence[Record]], str]
) -> list[Row]:
    """Return a row per workload with a cell for the chosen runs of each method."""
    methods = results.settings.methods
    rows: list[Row] = [("workload", *methods)]
    for workload in results.workloads:
        if chosen := ruleset.chosen.get(workload.name):
            rows.append((workload.title, *(cell(chosen[method]) for method in methods)))
    return rows


def failures(results: Results) -> list[str]:
    """Return sentences about runs that diverged, and about our own methods' growing losses."""
    found = [
        f"{record.entry.method} diverged on {record.entry.workload} ({record.entry.ruleset}, seed "
        f"{record.entry.seed}, {record.entry.setting}): {record.outcome.message}"
        for record in results.diverged()
    ]
    for record in results.records:
        entry, growth = record.entry, record.outcome.loss_growth
        watched = METHODS[entry.method].ours and entry.ruleset == "untuned"
        if watched and LARGEST_GROWTH < growth < math.inf:
            found.append(
                f"{entry.method} on {entry.workload}, seed {entry.seed}: the loss rose to "
                f"{growth:.2f} times its first value, above {LARGEST_GROWTH:g}"
            )
    return found


# The page


def suite_verdict(results: Results) -> str:
    """Return which methods have the best scores, in one sentence."""
    found = []
    for ruleset in results.rulesets:
        best, *others = ordered_methods(ruleset, results.settings.methods)
        firsts = sum(value == 1 for value in of_method(ruleset.ratios, best))
        text = f"{ruleset.name}, {best} has the best score ({ruleset.score(best):.2f}), and is the "
        text += f"fastest on {firsts} of {len(ruleset.times)} workloads"
        if others:
            text += f", before {others[0]} ({ruleset.score(others[0]):.2f})"
        found.append(text)
    sentence = "; ".join(found)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def write_suite_page(path: Path, results: Results) -> None:
    """Write the page of a benchmark atomically."""
    rulesets = {ruleset.name: _ruleset_section(results, ruleset) for ruleset in results.rulesets}
    sections: dict[str, Any] = {
        **{name: rulesets.get(name) for name in TITLES},
        "losses": {
            "rulesets": [
                (TITLES[ruleset.name], growth_rows(results, ruleset))
                for ruleset in results.rulesets
            ],
            "failures": failures(results),
        }
        if rulesets
        else None,
        "rules": {"workloads": workload_rows(results), "settings": _settings(results)},
    }
    write_html(
        path,
        "suite.html",
        title="Time to target over several workloads",
        verdict=suite_verdict(results),
        notes=notes(results),
        sections=sections,
    )


def notes(results: Results) -> list[str]:
    """Return what a reader must know: what is complete, and with how many seeds."""
    hours = results.spent / 3600
    found = [f"{hours:.1f} hours in all." if hours >= 0.1 else f"{results.spent:.0f} seconds."]
    if not results.complete:
        found.append("The benchmark is not complete; workloads without results are left out.")
    for ruleset in results.rulesets:
        counts = sorted(set(ruleset.seeds.values()))
        text = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        found.append(f"{TITLES[ruleset.name]}: workloads: {len(ruleset.times)}, seeds: {text}.")
    if results.settings.quick:
        found.append("Quick version: fewer workloads, with easier targets and shorter limits.")
    return found


def workload_rows(results: Results) -> list[Row]:
    """Return the table of workloads."""
    rows: list[Row] = [("workload", "name", "batch", "target", "limit (s)")]
    for each in results.workloads:
        rows.append((each.title, each.name, str(each.batch_size), each.goal, number(each.seconds)))
    return rows


def _settings(results: Results) -> list[Row]:
    settings = results.settings
    rows = [("", "value"), ("methods", ", ".join(settings.methods))]
    shown = ("seeds", "trials", "threads", "limit_factor")
    rows += [(name.replace("_", " "), str(getattr(settings, name))) for name in shown]
    return [*rows, *((name, str(value)) for name, value in settings.environment.items())]


def _ruleset_section(results: Results, ruleset: Ruleset) -> dict[str, Any]:
    methods = list(results.settings.methods)
    return {
        "scores": score_rows(results, ruleset),
        "times": time_rows(results, ruleset),
        "test": final_test_rows(results, ruleset),
        "chosen": setting_rows(results, ruleset) if ruleset.name == "tuned" else [],
        "legend": list(enumerate(methods)),
        "profile": [_profile_figure(ruleset, methods)],
        "curves": [
            _curve_figure(results, ruleset, workload.name)
            for workload in results.workloads
            if workload.name in ruleset.times
        ],
    }


def _profile_figure(ruleset: Ruleset, methods: Sequence[str]) -> Figure:
    traces = []
    for index, method in enumerate(methods):
        taus, fractions = profile_steps(of_method(ruleset.ratios, method))
        trace = line(index, method, taus, fractions)
        trace["line"]["shape"] = "hv"
        template = "%{y:.0%} of the workloads within %{x:.3~g} times the best"
        traces.append({**trace, "hovertemplate": template})
    shape = layout("τ, time relative to the fastest", "fraction of workloads", height=400)
    shape["xaxis"]["range"] = [1, LARGEST_RATIO]
    shape["yaxis"]["range"] = [-0.02, 1.02]
    return Figure(f"profile-{ruleset.name}", shape, [traces])


def _curve_figure(results: Results, ruleset: Ruleset, name: str) -> Figure:
    workload = next(each for each in results.workloads if each.name == name)
    traces: list[Json] = []
    for index, method in enumerate(results.settings.methods):
        record: Record = ruleset.chosen[name][method][0]
        points = [(at, value) for at, _, value in record.outcome.curve if math.isfinite(value)]
        template = "%{y:.3~g} after %{x:.3~g} s"
        xs, ys = [at for at, _ in points], [value for _, value in points]
        traces.append(line(index, method, xs, ys, hovertemplate=template))
    edge = max((x for trace in traces for x in trace["x"]), default=workload.seconds)
    target = line(0, "target", [0, edge], [workload.target] * 2, mode="lines")
    target["line"] = {"color": "#1a1a1a", "dash": "2px,3px", "width": 1}
    label = workload.metric.replace("_", " ").replace("train", "training")
    label = label if workload.metric.endswith("loss") else f"{label} (%)"
    shape = layout("seconds of training", label, log="y")
    return Figure(
        f"curve-{ruleset.name}-{name}",
        shape,
        [[*traces, target]],
        title=workload.title,
        caption=f"Target: {workload.goal} (dotted). First seed.",
    )
