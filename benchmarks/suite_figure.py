"""Merge results of `kfc compare suite`; write tables and a figure.

Runs of a workload and method in a later file replace those in earlier files.

python benchmarks/suite_figure.py runs/one/results.json runs/two/results.json \
    --json docs/results/suite-untuned.json --svg docs/pictures/suite.svg
python benchmarks/suite_figure.py docs/results/suite-untuned.json
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from drawing import document, segment, text

from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.scoring import (
    bounded_ratios,
    geometric_mean,
    median_time,
    of_method,
    ratios_to_best,
    score,
)

COLOURS = (
    "#4269d0",
    "#97bbf5",
    "#efb118",
    "#3ca951",
    "#9c6b4e",
    "#e4002b",
    "#a463f2",
    "#888",
    "#222",
)
LARGEST = 8.0  # ratio at the right end of the axis
LEFT, TOP, WIDTH, ROW = 210, 50, 500, 34
Results = dict[str, Any]


def merged(paths: list[Path]) -> Results:
    """Return the settings, workloads and runs of all files, without machine names."""
    parts = [json.loads(path.read_text()) for path in paths]
    workloads = {name: each for part in parts for name, each in part["workloads"].items()}
    latest: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part in parts:
        own: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in part["runs"]:
            run["curve"] = [[float(f"{x:.4g}") for x in point] for point in run["curve"]]
            own.setdefault((run["workload"], run["method"]), []).append(run)
        latest |= own
    settings = {key: parts[0]["settings"][key] for key in ("rulesets", "threads")}
    order = [*METHODS]
    found = {method for part in parts for method in part["settings"]["methods"]}
    settings["methods"] = [m for m in order if m in found] + sorted(found - {*order})
    return {
        "settings": settings,
        "workloads": workloads,
        "runs": [run for runs in latest.values() for run in runs],
    }


def times_of(results: Results) -> dict[str, dict[str, float]]:
    """Return the median over seeds of the seconds to the target, by workload and method."""
    times: dict[str, dict[str, float]] = {}
    for workload in results["workloads"]:
        times[workload] = {}
        for method in results["settings"]["methods"]:
            by_seed: dict[int, float] = {}
            for run in results["runs"]:
                if run["workload"] == workload and run["method"] == method:
                    seconds = run["seconds_to_target"]
                    value = math.inf if seconds is None else seconds
                    by_seed[run["seed"]] = min(value, by_seed.get(run["seed"], math.inf))
            if by_seed:
                times[workload][method] = median_time(list(by_seed.values()))
    return times


def tables(results: Results) -> str:
    """Return Markdown tables of times and of scores."""
    times, workloads = times_of(results), results["workloads"]
    methods = results["settings"]["methods"]
    lines = [f"| workload | target | {' | '.join(methods)} |", "|---" * (2 + len(methods)) + "|"]
    for name, row in times.items():
        limit, best = workloads[name]["limit_seconds"], min(row.values())
        cells = [_cell(row[m], best, min(limit, 4 * best)) for m in methods]
        lines.append(f"| `{name}` | {workloads[name]['goal']} | {' | '.join(cells)} |")
    limits = {name: each["limit_seconds"] for name, each in workloads.items()}
    ratios, bounded = ratios_to_best(times), bounded_ratios(times, limits)
    lines += [
        "",
        "| method | score | geometric mean of ratios | targets reached |",
        "|---|---|---|---|",
    ]
    for method in sorted(methods, key=lambda m: -score(of_method(ratios, m))):
        own = of_method(ratios, method)
        reached = sum(map(math.isfinite, own))
        bound = "" if reached == len(own) else "≥ "
        mean = geometric_mean(of_method(bounded, method))
        lines.append(
            f"| {method} | {score(own):.3f} | {bound}{mean:.2f} | {reached} of {len(own)} |"
        )
    if "tuned" in results["settings"]["rulesets"]:
        lines += ["", *_settings(results), "", *_test_values(results)]
    return "\n".join(lines)


def _settings(results: Results) -> list[str]:
    """Return the lines of a table of the settings of the fastest trials."""
    methods = results["settings"]["methods"]
    lines = [f"| workload | {' | '.join(methods)} |", "|---" * (1 + len(methods)) + "|"]
    for workload in results["workloads"]:
        cells = []
        for method in methods:
            runs = [
                r for r in results["runs"] if (r["workload"], r["method"]) == (workload, method)
            ]
            reached = [run for run in runs if run["seconds_to_target"] is not None]
            fastest = min(reached, key=lambda run: run["seconds_to_target"], default=None)
            cells.append("none" if fastest is None else fastest["setting"])
        lines.append(f"| `{workload}` | {' | '.join(cells)} |")
    return lines


def _test_values(results: Results) -> list[str]:
    """Return the lines of a table of test errors at the end of the best runs, medians over seeds.

    The best run of a seed is the fastest to the target, else the one with the best last value.
    """
    methods = results["settings"]["methods"]
    lines = [f"| test error | {' | '.join(methods)} |", "|---" * (1 + len(methods)) + "|"]
    for name, workload in results["workloads"].items():
        unit = "" if workload["metric"].endswith("loss") else "%"
        cells = []
        for method in methods:
            best: dict[int, tuple[float, float, float]] = {}
            for run in results["runs"]:
                if (run["workload"], run["method"]) == (name, method) and run.get("test"):
                    seconds = run["seconds_to_target"] or math.inf
                    found = seconds, run["curve"][-1][2], run["test"]
                    best[run["seed"]] = min(found, best.get(run["seed"], found))
            values = [test for _, _, test in best.values()]
            cells.append(f"{median_time(values):.3g}{unit}" if values else "-")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _cell(seconds: float, best: float, limit: float) -> str:
    if math.isinf(seconds):
        return f"> {limit:.3g}"
    return f"**{seconds:.3g}**" if seconds == best else f"{seconds:.3g}"


def figure(results: Results) -> str:
    """Return an SVG: for every workload, the methods' times relative to the fastest."""
    methods, workloads = results["settings"]["methods"], results["workloads"]
    ratios = ratios_to_best(times_of(results))
    height = TOP + ROW * len(ratios) + 60
    parts = []
    bottom = TOP + ROW * len(ratios)
    for ratio in (1, 1.5, 2, 3, 4):
        x = _place(ratio)
        parts.append(segment(x, x, TOP, bottom, "#ddd"))
        parts.append(text(x, bottom + 18, f"{ratio:g}x", "middle"))
    parts.append(
        text(_place(LARGEST), bottom + 18, "not reached", "middle")
        + text(
            LEFT, bottom + 42, "seconds of training to the target, relative to the fastest method"
        )
    )
    for index, (name, row) in enumerate(ratios.items()):
        y = TOP + ROW * (index + 0.5)
        parts.append(text(LEFT - 14, y + 4, f"{name}: {workloads[name]['goal']}", "end"))
        parts.append(segment(LEFT, LEFT + WIDTH, y, y, "#eee"))
        missed = 0
        for shift, (colour, method) in enumerate(zip(COLOURS, methods, strict=False)):
            missed += math.isinf(row[method])
            x = _place(row[method]) - (14 * (missed - 1) if math.isinf(row[method]) else 0)
            fill = "white" if math.isinf(row[method]) else colour
            centre = y + 2 * shift - len(methods) + 1
            parts.append(
                f'<circle cx="{x}" cy="{centre}" r="5" fill="{fill}" stroke="{colour}" '
                f'stroke-width="2"><title>{method}</title></circle>'
            )
    for index, (colour, method) in enumerate(zip(COLOURS, methods, strict=False)):
        x = LEFT + index * 86
        parts.append(
            f'<circle cx="{x}" cy="20" r="5.5" fill="{colour}"/>' + text(x + 10, 24, method)
        )
    title = "Time to target relative to the fastest method, by workload"
    return document(LEFT + WIDTH + 40, height, title, parts)


def _place(ratio: float) -> float:
    share = math.log(min(ratio, LARGEST)) / math.log(LARGEST)
    return round(LEFT + 10 + share * (WIDTH - 20), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("results", nargs="+", type=Path, help="results.json of benchmarks")
    parser.add_argument("--json", type=Path, help="write the merged results to this file")
    parser.add_argument("--svg", type=Path, help="write the figure to this file")
    arguments = parser.parse_args()
    results = merged(arguments.results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    if arguments.svg:
        arguments.svg.write_text(figure(results))
    print(tables(results))


if __name__ == "__main__":
    main()
