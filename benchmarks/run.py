"""Time training steps, patch moments and first steps: `make bench`.

All methods take turns in one process. Ratios to SGD are computed within a round, so that other
load on the machine affects both sides alike. Writes a JSON file and a page with figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import second_moment
import torch
from machine import machine, versions, wait_for
from methods import DEFAULT, METHODS, OURS, PEERS, PLAIN, Method, Step
from networks import NETWORKS
from page import write_page

HERE = Path(__file__).parent
SECTIONS = ("moments", "growth", "steps", "default", "first")
# The number of rounds of methods that need a whole cycle of steps.
CYCLE_ROUNDS = 3
# The steps that means of the default settings cover, and that SGD takes turns with.
PARTS = ((1, 25), (101, 200))


@dataclass
class Timed:
    """Seconds per step of a method, and of SGD in the same round."""

    method: str
    seconds: list[float]
    plain: list[float]

    @property
    def ratios(self) -> list[float]:
        return [mine / plain for mine, plain in zip(self.seconds, self.plain, strict=True)]

    def summary(self) -> dict[str, Any]:
        low, middle, high = quartiles(self.ratios)
        return {
            "method": self.method,
            "note": METHODS[self.method].note,
            "milliseconds": 1000 * statistics.median(self.seconds),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "rounds": len(self.ratios),
        }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Bench:
    """Measurements with one network and batch size."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.network = NETWORKS[options.network]
        self.batch = options.batch or self.network.batch
        self.images, self.labels = self.network.data(self.batch, self.device)
        self.failures: dict[str, str] = {}

    def build(self, method: Method) -> Step | None:
        """Return a method after its first step; ``None`` if it fails, which is reported."""
        try:
            torch.manual_seed(0)
            step = method.build(self.network.model(self.device))
            step(self.images, self.labels)
        except Exception as error:
            self.failures[method.name] = f"{type(error).__name__}: {error}"
            say(f"{method.name} failed: {type(error).__name__}: {error}")
            return None
        return step

    def seconds(self, step: Step, count: int = 1) -> float:
        """Return the mean time of some steps."""
        wait_for(self.device)
        start = perf_counter()
        for _ in range(count):
            step(self.images, self.labels)
        wait_for(self.device)
        return (perf_counter() - start) / count

    def steps(self, methods: Iterable[Method]) -> list[dict[str, Any]]:
        """Return the times of steps, relative to SGD in the same round."""
        built = {m.name: s for m in [PLAIN, *methods] if (s := self.build(m)) is not None}
        timed = {name: Timed(name, [], []) for name in built}
        for turn in range(1 + self.options.repeats):
            plain = 0.0
            for name, step in built.items():
                cycle = METHODS[name].cycle
                if cycle > 1 and turn > CYCLE_ROUNDS:
                    continue
                if cycle > 1 and turn == 0:
                    # A cycle is timed from its expensive step on.
                    self.seconds(step, cycle - 1)
                    continue
                mine = self.seconds(step, cycle)
                plain = mine if name == PLAIN.name else plain
                if turn:  # the first round warms up
                    timed[name].seconds.append(mine)
                    timed[name].plain.append(plain)
            say(f"steps: round {turn} of {self.options.repeats}")
        return [result.summary() for result in timed.values()]

    def default_settings(self) -> dict[str, Any]:
        """Return mean ratios to SGD over parts of the first steps with default settings."""
        torch.manual_seed(0)
        plain = PLAIN.build(self.network.model(self.device))
        ours = DEFAULT.build(self.network.model(self.device))
        self.seconds(plain, 3)
        steps, done, result = self.options.default_steps, 0, {}
        for first, last in [(first, min(last, steps)) for first, last in PARTS if first <= steps]:
            for _ in range(done, first - 1):
                self.seconds(ours)
            times = [(self.seconds(plain), self.seconds(ours)) for _ in range(first, last + 1)]
            done = last
            mean = sum(mine for _, mine in times) / sum(theirs for theirs, _ in times)
            result[f"{first} to {last}"] = mean
            say(f"default settings: {mean:.2f} over steps {first} to {last}")
        return result

    def first_steps(self, methods: Iterable[Method]) -> list[dict[str, Any]]:
        """Return the time of the first step and the peak memory, in a process per method."""
        results = []
        for method in methods:
            command = [sys.executable, str(HERE / "worker.py"), method.name]
            options = {
                "network": self.options.network,
                "batch": self.batch,
                "threads": self.options.threads,
                "device": self.options.device,
            }
            for name, value in options.items():
                command += [f"--{name}", str(value)]
            done = subprocess.run(command, capture_output=True, text=True)
            say(f"first steps and memory: {method.name}")
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                self.failures[method.name] = lines[-1] if lines else "no error message"
                continue
            numbers = json.loads(done.stdout.splitlines()[-1])
            results.append({"method": method.name, **numbers})
        return results


def moments(repeats: int) -> list[dict[str, Any]]:
    """Return the times of patch moments, compared with unfold-and-multiply."""
    results = []
    for case in second_moment.CASES:
        times = second_moment.measure(case, repeats)
        ratios = [a / b for a, b in zip(times["unfold"], times["kfc"], strict=True)]
        low, middle, high = quartiles(ratios)
        results.append(
            {
                "case": str(case),
                "unfold_milliseconds": statistics.median(times["unfold"]),
                "kfc_milliseconds": statistics.median(times["kfc"]),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "error": second_moment.error(case),
            }
        )
        say(f"patch moments: {case}")
    return results


def growth(repeats: int) -> list[dict[str, Any]]:
    """Return how times of patch moments grow with the batch, channels and map size."""
    results = []
    for what in second_moment.GROWTH:
        found = second_moment.measure_growth(what, repeats)
        results.append({**asdict(found), "slopes": found.slopes})
        say(f"growth in {what}")
    return results


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Table(NamedTuple):
    title: str
    head: list[str]
    rows: list[list[str]]

    def as_markdown(self) -> str:
        lines = [f"| {' | '.join(row)} |" for row in [self.head, *self.rows]]
        rule = "|---" * len(self.head) + "|"
        return "\n".join(["", f"**{self.title}**", "", lines[0], rule, *lines[1:]])


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables that are printed and copied to docs/benchmarks.md."""
    if "moments" in results:
        rows = [
            [
                r["case"],
                f"{r['unfold_milliseconds']:.0f}",
                f"{r['kfc_milliseconds']:.1f}",
                with_spread(r),
                f"{r['error']:.0e}",
            ]
            for r in results["moments"]
        ]
        yield Table("Patch moments", ["case", "unfold ms", "kfc ms", "ratio", "kfc's error"], rows)
    if "growth" in results:
        slopes = [(r["what"], r["slopes"]) for r in results["growth"]]
        rows = [[what, f"{s['kfc']:.2f}", f"{s['unfold']:.2f}"] for what, s in slopes]
        yield Table("Growth: slope of log time", ["in", "kfc", "unfold"], rows)
    if "steps" in results:
        rows = [
            [r["method"], f"{r['milliseconds']:.0f}", with_spread(r), r["note"]]
            for r in results["steps"]
        ]
        yield Table("Step, relative to SGD", ["method", "ms", "ratio", ""], rows)
    if "default" in results:
        rows = [[steps, f"{ratio:.2f}"] for steps, ratio in results["default"].items()]
        yield Table("KFC with default settings, mean", ["steps", "ratio"], rows)
    if "first" in results:
        rows = [
            [
                r["method"],
                f"{(r['building'] + r['first_step']) / r['sgd_step']:.2f}",
                f"{r['mebibytes']:.0f}",
                f"{r['mebibytes'] / r['sgd_mebibytes']:.2f}",
            ]
            for r in results["first"]
        ]
        head = ["method", "building and first step / SGD step", "peak MiB", "/ SGD's peak"]
        yield Table("First step and memory", head, rows)
    if results["failures"]:
        yield Table("Failed", ["method", "why"], [[k, v] for k, v in results["failures"].items()])


def with_spread(result: dict[str, Any]) -> str:
    low, high = result["ratio_quartiles"]
    return f"{result['ratio']:.2f} ({low:.2f} to {high:.2f})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="patterns of method names, such as 'KFC*'"
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--network", choices=NETWORKS, default="cifar10")
    parser.add_argument("--batch", type=int, help="the batch size; by default that of the network")
    parser.add_argument("--repeats", type=int, default=15, help="the number of timed rounds")
    parser.add_argument(
        "--default-steps", type=int, default=200, help="the steps that default settings are timed"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="the folder of the results"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all methods")
    return parser.parse_args(arguments)


def chosen_methods(patterns: list[str] | None) -> list[Method]:
    """Return the methods whose names match a pattern; all if there are none."""
    chosen = [
        method
        for method in [*OURS, *PEERS]
        if not patterns or any(fnmatch(method.name.lower(), p.lower()) for p in patterns)
    ]
    if not chosen:
        sys.exit(f"no method matches {patterns}; --list shows all names")
    return chosen


def measure(bench: Bench, methods: list[Method], options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of all chosen sections."""
    packages = list(dict.fromkeys(method.package for method in METHODS.values()))
    results: dict[str, Any] = {
        "machine": machine(bench.device),
        "versions": versions(packages),
        "network": options.network,
        "batch": bench.batch,
    }
    if "moments" in options.sections:
        results["moments"] = moments(options.repeats)
    if "growth" in options.sections:
        results["growth"] = growth(max(1, options.repeats // 5))
    if "steps" in options.sections:
        results["steps"] = bench.steps(methods)
    if "default" in options.sections:
        results["default"] = bench.default_settings()
    if "first" in options.sections:
        single = [m for m in methods if m.cycle == 1 and m.name not in bench.failures]
        results["first"] = bench.first_steps([PLAIN, DEFAULT, *single])
    return {**results, "failures": bench.failures}


def main() -> None:
    options = parse()
    if options.list:
        print("\n".join(METHODS))
        return
    methods = chosen_methods(options.only)
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    results = measure(bench, methods, options)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"{options.network}-{bench.batch}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, stem.with_suffix(".html"))
    print(", ".join(f"{k} {v}" for k, v in {**results["machine"], **results["versions"]}.items()))
    print(f"network {options.network}, batch {bench.batch}")
    for table in tables(results):
        print(table.as_markdown())
    say(f"\nwritten: {stem.with_suffix('.json')}, {stem.with_suffix('.html')}")


if __name__ == "__main__":
    main()
