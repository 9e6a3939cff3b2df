"""The command `kfc compare suite`: a benchmark over several workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import torch
import typer
from rich.progress import Progress, TaskID

from kfc.lab.cli import screen
from kfc.lab.cli.options import Create, DataDir
from kfc.lab.data.loading import create_data_folder
from kfc.lab.disk import locked, write_json
from kfc.lab.environment import environment
from kfc.lab.options import ConfigError, not_one_of
from kfc.lab.report.suite import failures, notes, score_rows, time_rows, write_suite_page
from kfc.lab.suite.benchmark import Benchmark, Round, load_problem
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.results import Results
from kfc.lab.suite.search import POINTS
from kfc.lab.suite.store import RULESETS, UNTUNED, BenchmarkSettings, Record, Store
from kfc.lab.suite.workloads import WORKLOADS

PAGE, RESULTS = "report.html", "results.json"
HOURS, QUICK_HOURS = 3.0, 1 / 6
SEEDS, TRIALS = 3, 5
BOTH = "both"

Workloads = Annotated[
    str | None, typer.Option(help=f"Comma-separated: {', '.join(WORKLOADS)}. Default: all.")
]
Methods = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated: {', '.join(METHODS)}. Default: all that are installed."),
]
RulesetOption = Annotated[
    str | None,
    typer.Option(help="untuned, tuned or both. Default: both; untuned with --quick."),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help=f"Seeds of the final runs. Default: {SEEDS}; 1 if quick.")
]
Trials = Annotated[
    int | None,
    typer.Option(min=1, max=1 + len(POINTS), help=f"Settings tried when tuned. Default: {TRIALS}."),
]
Hours = Annotated[
    float | None,
    typer.Option(help=f"Wall-clock time in all. Default: {HOURS:g}; ten minutes with --quick."),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Fewer workloads, easier targets, one seed: ten minutes."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of each run. Default: torch's number.")
]
LimitFactor = Annotated[
    float | None,
    typer.Option(help="Multiply all time limits, for a slower or faster machine. Default: 1."),
]
Resume = Annotated[
    Path | None, typer.Option(help="Continue this benchmark; --hours can make it longer.")
]


def compare_suite(
    workloads: Workloads = None,
    methods: Methods = None,
    ruleset: RulesetOption = None,
    seeds: Seeds = None,
    trials: Trials = None,
    hours: Hours = None,
    quick: Quick = False,
    threads: Threads = None,
    limit_factor: LimitFactor = None,
    out: Annotated[Path | None, typer.Option(help="Folder; it must not exist.")] = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    create: Create = False,
) -> None:
    """Measure the time that optimizers need to reach given targets on several workloads.

    The rules are those of AlgoPerf. Untuned: every method is constructed
    without any argument. Tuned: every method has the same number of trials
    from the same search space. All runs on a workload take turns in short
    slices. The benchmark can be interrupted at any time and resumed.

    Examples:

      kfc compare suite --quick

      kfc compare suite --workloads cifar10,vit --methods AdamW,SOAP,KFC

      kfc compare suite --resume runs/suite --hours 6
    """
    with screen.clear_errors():
        if create:
            create_data_folder(data_dir)
        if resume is not None:
            given = (workloads, methods, ruleset, seeds, trials, threads, limit_factor)
            if quick or out or any(option is not None for option in given):
                raise typer.BadParameter(
                    "a resumed benchmark keeps its settings; only --hours can be changed",
                    param_hint="--resume",
                )
            store = _resumed(resume, hours)
        else:
            names = _chosen("--workloads", workloads, _quick_names() if quick else WORKLOADS)
            settings = BenchmarkSettings(
                workloads=names,
                methods=_available("--methods", methods),
                rulesets=_rulesets(ruleset, quick, trials),
                seeds=seeds or (1 if quick else SEEDS),
                trials=trials or TRIALS,
                hours=_positive("--hours", _or(hours, QUICK_HOURS if quick else HOURS)),
                quick=quick,
                threads=threads or torch.get_num_threads(),
                limit_factor=_positive("--limit-factor", _or(limit_factor, 1.0)),
                digests={name: load_problem(name, data_dir).digest for name in names},
                environment=environment(),
            )
            name = "suite-quick" if quick else "suite"
            store = Store.create(out or screen.free_path(Path("runs") / name), settings)
        _run(store, data_dir)


def _resumed(folder: Path, hours: float | None) -> Store:
    store = Store(folder)
    if hours is not None:
        store.replace_settings(replace(store.settings, hours=_positive("--hours", hours)))
    return store


def _run(store: Store, data_dir: Path | None) -> None:
    with (
        closing(locked(store.folder)),
        screen.progress_bars() as progress,
        screen.interruptions() as interrupted,
    ):
        display = Display(progress)
        benchmark = Benchmark(store, data_dir=data_dir, on_turn=display, interrupted=interrupted)
        complete = benchmark.run()
        requested = interrupted()
    results = Results(
        store.settings, benchmark.workloads, store.spent, complete, benchmark.records()
    )
    publish(results, store.folder)
    again = f"kfc compare suite --resume {quote(str(store.folder))}"
    if requested:
        screen.say(f"Interrupted. To continue: {again}")
        raise typer.Exit(screen.INTERRUPTED)
    if not complete:
        hours = store.settings.hours
        screen.say(f"The {hours:g} hours are over. To continue: {again} --hours {2 * hours:g}")


def publish(results: Results, folder: Path) -> None:
    """Print the tables, and write the results and the page."""
    for note in notes(results):
        screen.say(note)
    for ruleset in results.rulesets:
        times = time_rows(results, ruleset, brief=True)
        screen.console.print(screen.as_table(score_rows(results, ruleset), ruleset.name))
        screen.console.print(screen.as_table(times, compact=True))
    for failure in failures(results):
        screen.say(failure)
    page = folder / PAGE
    with screen.writing(page):
        write_json(folder / RESULTS, results.to_json())
        write_suite_page(page, results)
    screen.say(f"Page: {page.resolve()}")


class Display:
    """Shows the runs of the current round as progress bars, and the end of each run as a line."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._round: Round | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, current: Round, record: Record) -> None:
        if self._round is not current:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._round, self._tasks = current, {}
            screen.say(f"{current.title}: {current.workload.goal}, {len(current.entries)} runs")
        entry, outcome = record.entry, record.outcome
        label = f"{entry.method} {entry.trial}" if entry.ruleset != UNTUNED else entry.method
        if entry.name not in self._tasks:
            self._tasks[entry.name] = self._progress.add_task(
                screen.shown(label), total=1.0, state=""
            )
        value = outcome.curve[-1][2] if outcome.curve else math.nan
        state = f"{current.workload.metric.replace('_', ' ')} {value:.3g} {outcome.end}"
        done = 1.0 if outcome.end else outcome.seconds / current.workload.seconds
        task = self._tasks[entry.name]
        self._progress.update(task, completed=done, state=state)
        if outcome.end:
            detail = f": {outcome.message}" if outcome.message else ""
            setting = "" if entry.ruleset == UNTUNED else f" ({entry.setting})"
            screen.say(
                f"  {label}{setting}: {outcome.end} after {outcome.seconds:.1f} s, "
                f"{current.workload.metric.replace('_', ' ')} {value:.4g}{detail}"
            )


# Arguments


def _chosen(option: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    names = tuple(known)
    if text is None:
        return names
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        wrong = unknown[0] if unknown else text
        raise ConfigError(not_one_of(f"every name in {option}", wrong, names))
    return chosen


def _available(option: str, text: str | None) -> tuple[str, ...]:
    """Return the chosen methods; those that are not available are an error only if named."""
    chosen = _chosen(option, text, METHODS)
    missing = {name: why for name in chosen if (why := METHODS[name].missing())}
    if missing and text is not None:
        raise typer.BadParameter("; ".join(missing.values()), param_hint=option)
    for why in missing.values():
        screen.say(f"Left out: {why}")
    return tuple(name for name in chosen if name not in missing)


def _rulesets(text: str | None, quick: bool, trials: int | None) -> tuple[str, ...]:
    text = (UNTUNED if quick else BOTH) if text is None else text
    if text not in (*RULESETS, BOTH):
        raise ConfigError(not_one_of("--ruleset", text, [*RULESETS, BOTH]))
    if text == UNTUNED and trials is not None:
        raise typer.BadParameter(
            "has no effect without the tuned ruleset; add --ruleset tuned or both",
            param_hint="--trials",
        )
    return RULESETS if text == BOTH else (text,)


def _quick_names() -> Sequence[str]:
    return [name for name, workload in WORKLOADS.items() if workload.quick]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _positive(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"must be a positive number, got {value}", param_hint=option)
    return value
