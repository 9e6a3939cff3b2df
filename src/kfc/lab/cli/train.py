"""The command `kfc train`, which trains one run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from kfc.distributed.ranks import Ranks
from kfc.lab.cli import screen
from kfc.lab.cli.options import parameter, with_options
from kfc.lab.config import (
    DATA,
    LIMITS,
    OPTIMIZER,
    OPTIONS,
    RECORDS,
    RunConfig,
    config_from_dict,
    make_config,
)
from kfc.lab.data import Dataset, load
from kfc.lab.optimizers import all_optimizer_options
from kfc.lab.options import duration, option, options_of
from kfc.lab.processes.ranks import Launch, failing_together, joined
from kfc.lab.runs import RemoteFolder, RunError, RunFolder, is_of_job, read_record
from kfc.lab.training import Trainer

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class CommandOptions:
    """Options of the command that are not part of a run's configuration."""

    data_dir: Path | None = option(None, "Folder of the data sets", panel=DATA)
    timeout: float | None = option(
        None,
        "Longest time that a process of torchrun may keep the others waiting; by default 5m",
        panel=RECORDS,
        parse=duration,
    )
    out: Path | None = option(None, "Folder of the run; it must not exist", panel=RECORDS)
    resume: Path | None = option(
        None, "Continue the run in this folder; only its length may be changed", panel=RECORDS
    )


def train_parameters() -> Iterator[inspect.Parameter]:
    """Yield a parameter for every option of a run, of every optimizer, and of the command."""
    for declared in OPTIONS.values():
        yield parameter(declared)
        if declared.name == "weight_decay":
            for owners in all_optimizer_options().values():
                defaults = {optimizer: each.default for optimizer, each in owners.items()}
                shared = next(iter(owners.values()))
                yield parameter(shared, panel=OPTIMIZER, defaults=defaults)
    yield from map(parameter, options_of(CommandOptions).values())


@with_options(train_parameters())
def train(
    data_dir: Path | None,
    timeout: float | None,
    out: Path | None,
    resume: Path | None,
    **values: Any,
) -> None:
    """Train one network with one optimizer, and record the run in a folder.

    Ctrl-C saves a checkpoint and ends. --resume continues from there, or after a crash from
    the last checkpoint, exactly as if the run had not been interrupted.

    torchrun trains in several processes, each with its part of every batch: on the CPU, or
    with --device cuda on one GPU each. With --max-restarts, torchrun restarts after a failure
    from the last checkpoint. --resume works with any number of processes.

    Examples:

      kfc train --data digits --epochs 5

      kfc train --data cifar10 --net cuda-convnet --optimizer sgd --lr 0.001 --time 10m

      kfc train --data cifar10 --net mynets:small --lr 0.003 --damping 0.01 --out runs/mine

      kfc train --resume runs/mine --epochs 20

      torchrun --nproc-per-node=2 --max-restarts=3 -m kfc train --data cifar10 --time 1h
    """
    given = {name: value for name, value in values.items() if value is not None}
    if resume is not None:
        _refuse_settings([*given, *(["out"] if out else [])])
    launch = Launch.from_environment()

    def plan() -> Plan:
        if resume is not None:
            return _plan_to_continue(resume, [given.get(name) for name in LIMITS], launch)
        return _plan_to_start(make_config(**given), out, launch)

    with screen.clear_errors():
        with joined(launch, timeout or DEFAULT_TIMEOUT) as ranks:
            with failing_together(ranks):
                own = plan() if ranks.rank == 0 else None
            trainer = _run(_shared(own, ranks), data_dir, launch, ranks)
            code = _print_end(trainer, launch)
        raise typer.Exit(code)


@dataclass(frozen=True)
class Plan:
    """The run to train.

    Attributes:
        folder: the folder of a run to continue; ``None`` for a new run.
        restarted: whether the launcher has started the same command before.
    """

    path: Path
    config: RunConfig
    folder: RunFolder | RemoteFolder | None
    restarted: bool = False


def _plan_to_start(config: RunConfig, out: Path | None, launch: Launch) -> Plan:
    """Plan a new run, or the one that this command began before torchrun restarted it."""
    default = Path("runs") / f"{config.data}-{config.net.replace(':', '-')}-{config.optimizer}"
    for path in [out] if out else takewhile(Path.exists, screen.numbered(default)):
        # Each machine counts restarts for itself; but another job may have the same name later.
        if is_of_job(path, config, launch.job) and (launch.restarted or not read_record(path).end):
            _refuse_diverged(path, launch)
            return Plan(path, config, RunFolder.open(path), restarted=True)
    return Plan(out or screen.free_path(default), config, None)


def _plan_to_continue(path: Path, limits: list[Any], launch: Launch) -> Plan:
    folder = RunFolder.open(path)
    config = folder.config.with_limits(*limits)
    _refuse_diverged(path, launch)
    if not launch.restarted:
        _refuse_passed_limits(path, config)
    folder.set_config(config)
    return Plan(path, config, folder, restarted=launch.restarted)


def _shared(plan: Plan | None, ranks: Ranks) -> Plan:
    """Return rank 0's plan on all ranks; the others need not have access to its disk."""
    content: dict[str, Any] = {}
    if plan is not None:
        digest = plan.folder.data_digest if plan.folder else None
        content = {"path": str(plan.path), "config": plan.config.to_dict(), "digest": digest}
    content = ranks.share(content)
    if plan is not None:
        return plan
    path, config = Path(content["path"]), config_from_dict(content["config"])
    folder = RemoteFolder(path, config, content["digest"]) if content["digest"] else None
    return Plan(path, config, folder)


def _refuse_settings(given: list[str]) -> None:
    fixed = [name for name in given if name not in LIMITS]
    if fixed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise typer.BadParameter(
            f"a resumed run keeps its settings, so {options} cannot be given; only its length "
            "can: --epochs, --updates, --time",
            param_hint="--resume",
        )


def _refuse_passed_limits(path: Path, config: RunConfig) -> None:
    rows = read_record(path).evaluations
    if rows and config.fraction_done(rows[-1]) > 1:
        position = f"epoch {rows[-1]['epoch']:.4g}, update {rows[-1]['update']}"
        raise RunError(f"{path} is already beyond that: at {position}, {rows[-1]['seconds']:.1f} s")


def _refuse_diverged(path: Path, launch: Launch) -> None:
    """Raise ``RunError`` if torchrun has restarted a run that would diverge again."""
    end = read_record(path).end if launch.restarted else None
    if end is not None and end["reason"] == "diverged":
        raise RunError(f"{path} has diverged and is not continued: {end['message']}")


def _run(plan: Plan, data_dir: Path | None, launch: Launch, ranks: Ranks) -> Trainer:
    """Train to the end, or until interrupted."""
    dataset = _load(plan.config, data_dir, launch, ranks)
    silent = ranks.rank > 0
    if silent:  # all ranks have the same warnings
        warnings.simplefilter("ignore")
    with (
        screen.progress_bars(hidden=silent) as progress,
        screen.Interruption(patient=launch.job is not None) as interrupted,
    ):
        show = None if silent else screen.RunDisplay(progress, plan.config.optimizer, plan.config)
        if plan.folder is None:
            trainer = Trainer.start(
                *(plan.path, plan.config, dataset), name=plan.path.name, on_row=show, ranks=ranks
            )
        else:
            trainer = Trainer.resume(plan.folder, dataset, on_row=show, ranks=ranks)
            if plan.restarted and not silent:
                screen.say(f"Restarted: {plan.path} continues from update {trainer.update}")
        try:
            if trainer.advance(interrupted=interrupted):
                trainer.save()
        finally:
            trainer.close()
    return trainer


def _load(config: RunConfig, data_dir: Path | None, launch: Launch, ranks: Ranks) -> Dataset:
    """Load the data; only the first process of each machine downloads it."""
    with failing_together(ranks):
        dataset = load(config.data, data_dir) if launch.local_rank == 0 else None
    with failing_together(ranks):
        return dataset or load(config.data, data_dir, progress=False)


def _print_end(trainer: Trainer, launch: Launch) -> int:
    """Print on rank 0 how the run ended; return the exit code."""
    path = trainer.folder.path
    if trainer.end is None:
        command = f"{launch.command()} train --resume {quote(str(path))}"
        message = f"Interrupted at update {trainer.update}. To continue: {command}"
        code = screen.INTERRUPTED
    elif trainer.end["reason"] == "diverged":
        message = f"diverged: {trainer.end['message']}. The run is in {path}"
        code = screen.DIVERGED
    else:
        message, code = f"Run: {path}\nPage: kfc report {quote(str(path))}", 0
    if launch.rank == 0:
        (screen.complain if code == screen.DIVERGED else screen.say)(message)
    return code
