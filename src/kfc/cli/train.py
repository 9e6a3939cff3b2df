"""`kfc train`: one run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeAlias

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from kfc.cli.screen import (
    DIVERGED,
    INTERRUPTED,
    Interruption,
    clear_errors,
    complain,
    evaluation_line,
    free_path,
    numbered,
    parse_duration,
    progress_bars,
    say,
    state_of,
)
from kfc.distributed.placement import PLACEMENTS
from kfc.distributed.workers import Workers
from kfc.experiments.config import RunConfig, config_from_dict, make_config
from kfc.experiments.data import NAMES, Dataset, load
from kfc.experiments.networks import NETWORKS
from kfc.experiments.optimizers import OPTIMIZERS
from kfc.experiments.processes import Launch, failing_together, joined
from kfc.experiments.runs import ForeignFolder, RunError, RunFolder, is_of_job, read_record
from kfc.experiments.training import Row, Trainer
from kfc.layers.structures import STRUCTURES

DEFAULT_TIMEOUT = 300.0


def _of_data(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Data and network")


def _of_optimizer(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Optimizer")


def _of_length(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Length")


def _of_records(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Machine and records")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Text: TypeAlias = str | None


def train(
    data: Annotated[Text, _of_data(f"One of {_listed(NAMES)}.")] = None,
    net: Annotated[Text, _of_data(f"{_listed(NETWORKS)}; or your own as module:function.")] = None,
    init: Annotated[Text, _of_data("paper or kaiming, or the network's own; see the docs.")] = None,
    inputs: Annotated[
        Text, _of_data("centred (minus the mean image), normalised (to unit variance too), unit.")
    ] = None,
    batch_size: Annotated[
        Whole, _of_data("Of all processes together; by default the optimizer's.")
    ] = None,
    train_examples: Annotated[Whole, _of_data("Train on the first so many.")] = None,
    data_dir: Annotated[Path | None, _of_data("Where data sets are; see kfc data.")] = None,
    optimizer: Annotated[Text, _of_optimizer(f"{_listed(OPTIMIZERS)}; by default kfc.")] = None,
    lr: Annotated[Number, _of_optimizer("Learning rate; kfac chooses its own.")] = None,
    momentum: Annotated[Number, _of_optimizer("Of kfc, sgd, muon; kfac chooses its own.")] = None,
    weight_decay: Annotated[
        Text, _of_optimizer('Of all weights, or "paper" for the network\'s own; by default 0.')
    ] = None,
    damping: Annotated[Number, _of_optimizer("γ of kfc.")] = None,
    model_damping: Annotated[Number, _of_optimizer("λ of kfac; it adapts by default.")] = None,
    factor_damping: Annotated[Number, _of_optimizer("γ of kfac; it adapts by default.")] = None,
    initial_model_damping: Annotated[Number, _of_optimizer("Where kfac's λ begins.")] = None,
    damping_period: Annotated[Whole, _of_optimizer("kfac adapts λ every so many steps.")] = None,
    gamma_period: Annotated[Whole, _of_optimizer("kfac chooses γ every so many steps.")] = None,
    fisher_clip: Annotated[
        Number, _of_optimizer("C of kfc, and of kfac if given; 0 for no clipping.")
    ] = None,
    factor_decay: Annotated[Number, _of_optimizer("ξ of kfc and kfac.")] = None,
    statistics_period: Annotated[
        Whole, _of_optimizer("T_s of both; by default from 1 to 10.")
    ] = None,
    inverse_period: Annotated[Whole, _of_optimizer("T_f of both; by default from 1 to 20.")] = None,
    overhead: Annotated[
        Number, _of_optimizer("What kfc's curvature may add to a step's time, 0.25 for a quarter.")
    ] = None,
    fisher: Annotated[Text, _of_optimizer("sampled, exact or empirical, of both.")] = None,
    inverse: Annotated[Text, _of_optimizer("factored or eigen, of both.")] = None,
    curvature: Annotated[Text, _of_optimizer(f"{_listed(STRUCTURES)}, of both.")] = None,
    inverse_placement: Annotated[
        Text, _of_optimizer(f"{_listed(PLACEMENTS)}: which of several processes inverts, of both.")
    ] = None,
    inverse_worker: Annotated[
        Text, _of_optimizer("thread: inverses beside training; none (default), of both.")
    ] = None,
    max_staleness: Annotated[
        Whole, _of_optimizer("How many steps late such inverses are; by default T_f.")
    ] = None,
    beta1: Annotated[Number, _of_optimizer("Of adam, adamw, soap.")] = None,
    beta2: Annotated[Number, _of_optimizer("Of adam, adamw, soap.")] = None,
    adamw_lr: Annotated[Number, _of_optimizer("Of what muon leaves to AdamW.")] = None,
    precondition_frequency: Annotated[Whole, _of_optimizer("Of soap.")] = None,
    epochs: Annotated[Number, _of_length("By default 10.")] = None,
    updates: Annotated[Whole, _of_length("Steps of the optimizer.")] = None,
    time: Annotated[Text, _of_length('Of training alone: "90s", "10m", "1.5h".')] = None,
    averaging_examples: Annotated[
        Whole,
        _of_records(
            "Timescale of the averaged parameters; by default one epoch, at most 50000 examples."
        ),
    ] = None,
    evaluation_period: Annotated[Number, _of_records("In epochs; by default 1.")] = None,
    evaluation_examples: Annotated[
        Whole, _of_records("Evaluate on the first so many; by default 10000.")
    ] = None,
    checkpoint_seconds: Annotated[
        Number, _of_records("Training between checkpoints; by default 60.")
    ] = None,
    log_period: Annotated[Whole, _of_records("In updates; by default 10.")] = None,
    seed: Annotated[Whole, _of_records("Of weights, order and sampling; by default 0.")] = None,
    device: Annotated[Text, _of_records("cpu, cuda, mps, ...; by default cpu.")] = None,
    threads: Annotated[
        Whole, _of_records("Of each process; by default as many as torch takes.")
    ] = None,
    workers: Annotated[Whole, _of_records("Processes that prepare batches; by default 0.")] = None,
    timeout: Annotated[
        Text,
        _of_records("How long a process of torchrun may keep the others waiting; by default 5m."),
    ] = None,
    out: Annotated[Path | None, _of_records("The run's folder; it must not exist.")] = None,
    resume: Annotated[
        Path | None, _of_records("Go on with this run; only its length may be changed.")
    ] = None,
) -> None:
    """Train one network with one optimizer, into a folder of its own.

    Ctrl-C ends the run with a checkpoint. --resume goes on from there, or after a
    crash from the last checkpoint, as if nothing had happened.

    torchrun trains it in several processes, each with its part of every batch: on the
    CPU, or with --device cuda on a GPU each. After a failure, its --max-restarts goes on
    from the last checkpoint; --resume may be on any number of processes.

    Examples:

      kfc train --data digits --epochs 5

      kfc train --data cifar10 --net cuda-convnet --optimizer sgd --lr 0.001 --time 10m

      kfc train --data cifar10 --net mynets:small --lr 0.003 --damping 0.01 --out runs/mine

      kfc train --resume runs/mine --epochs 20

      torchrun --nproc-per-node=2 --max-restarts=3 -m kfc train --data cifar10 --time 1h
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("data_dir", "out", "resume", "time", "timeout"):
        given.pop(name, None)
    seconds = parse_duration(time)
    if resume is not None:
        _refuse_settings([*given, *(["out"] if out else [])])
    elif weight_decay is not None and weight_decay != "paper":
        given["weight_decay"] = _number("--weight-decay", weight_decay)
    launch = Launch.from_environment()

    def plan() -> Plan:
        if resume is not None:
            return _plan_to_go_on(resume, epochs, updates, seconds, launch)
        return _plan_to_begin(make_config(**given, seconds=seconds), out, launch)

    _carry_out(plan, data_dir, launch, _patience(timeout))


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        folder: of a run to go on with; ``None`` for a new one.
        again: whether the launcher has started the same command before.
    """

    path: Path
    config: RunConfig
    folder: RunFolder | ForeignFolder | None
    again: bool = False


def _carry_out(
    plan: Callable[[], Plan], data_dir: Path | None, launch: Launch, patience: float
) -> None:
    """With all processes that were launched; rank 0 makes the plan."""
    with clear_errors():
        with joined(launch, patience) as workers:
            with failing_together(workers):
                own = plan() if workers.rank == 0 else None
            trainer = _run(_shared(own, workers), data_dir, launch, workers)
            if workers.rank == 0:
                _say_how_it_ended(trainer, launch)
        raise typer.Exit(_exit_code(trainer))


def _plan_to_begin(config: RunConfig, out: Path | None, launch: Launch) -> Plan:
    """In a new folder; or in that which the same command began, if torchrun has restarted it."""
    wanted = Path("runs") / _default_name(config)
    tried = [out] if out else takewhile(Path.exists, numbered(wanted))
    for path in tried:
        # Machines count restarts for themselves; but a job's name may be used for another, later.
        if is_of_job(path, config, launch.job) and (launch.restarted or not read_record(path).end):
            _refuse_what_diverged(path, launch)
            return Plan(path, config, RunFolder.open(path), again=True)
    return Plan(out or free_path(wanted), config, None)


def _plan_to_go_on(
    path: Path, epochs: Number, updates: Whole, seconds: Number, launch: Launch
) -> Plan:
    folder = RunFolder.open(path)
    config = folder.config.with_limits(epochs, updates, seconds)
    _refuse_what_diverged(path, launch)
    if not launch.restarted:
        _refuse_passed_limits(path, config)
    folder.set_config(config)
    return Plan(path, config, folder, again=launch.restarted)


def _shared(plan: Plan | None, workers: Workers) -> Plan:
    """Rank 0's plan on all ranks: the others need not see its disk."""
    told: dict[str, Any] = {}
    if plan is not None:
        digest = plan.folder.data_digest if plan.folder else None
        told = {"path": str(plan.path), "config": plan.config.to_dict(), "digest": digest}
    told = workers.share(told)
    if plan is not None:
        return plan
    path, config = Path(told["path"]), config_from_dict(told["config"])
    folder = ForeignFolder(path, config, told["digest"]) if told["digest"] else None
    return Plan(path, config, folder)


def _refuse_settings(given: list[str]) -> None:
    foreign = [name for name in given if name not in ("epochs", "updates")]
    if foreign:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise typer.BadParameter(
            f"a resumed run keeps its settings; {options} cannot be given (its length can: "
            "--epochs, --updates, --time)",
            param_hint="--resume",
        )


def _refuse_passed_limits(path: Path, config: RunConfig) -> None:
    rows = read_record(path).evaluations
    if rows and config.part_of_the_way(rows[-1]) > 1:
        here = f"epoch {rows[-1]['epoch']:.4g}, update {rows[-1]['update']}"
        raise RunError(f"{path} is further already: at {here}, {rows[-1]['seconds']:.1f} s")


def _refuse_what_diverged(path: Path, launch: Launch) -> None:
    """torchrun restarts whatever fails, but from the same checkpoint it would come to the same."""
    end = read_record(path).end if launch.restarted else None
    if end is not None and end["reason"] == "diverged":
        raise RunError(f"{path} has diverged, and is not tried again: {end['message']}")


def _patience(timeout: Text) -> float:
    seconds = parse_duration(timeout)
    if seconds is None:
        return DEFAULT_TIMEOUT
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{timeout!r} is no time to wait for", param_hint="--timeout")
    return seconds


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(
            f'{text!r} is neither a number nor "paper"', param_hint=option
        ) from error


def _default_name(config: RunConfig) -> str:
    return f"{config.data}-{config.net.replace(':', '-')}-{config.optimizer}"


def _run(plan: Plan, data_dir: Path | None, launch: Launch, workers: Workers) -> Trainer:
    """Train to the end, or until interrupted."""
    dataset = _load(plan.config, data_dir, launch, workers)
    silent = workers.rank > 0
    if silent:  # what is to be warned of is the same on all ranks
        warnings.simplefilter("ignore")
    patient = launch.job is not None
    with progress_bars(hidden=silent) as progress, Interruption(patient=patient) as interrupted:
        task = progress.add_task(escape(plan.config.optimizer), total=1.0, state="")
        show = (lambda row: None) if silent else _Display(progress, task, plan.config)
        if plan.folder is None:
            trainer = Trainer.start(
                *(plan.path, plan.config, dataset),
                name=plan.path.name,
                on_row=show,
                workers=workers,
            )
        else:
            trainer = Trainer.resume(plan.folder, dataset, on_row=show, workers=workers)
            if plan.again and not silent:
                say(f"Restarted: {plan.path} goes on from update {trainer.update}")
        try:
            if trainer.advance(interrupted=interrupted):
                trainer.save()
        finally:
            trainer.close()
    return trainer


def _load(config: RunConfig, data_dir: Path | None, launch: Launch, workers: Workers) -> Dataset:
    """The first process of a machine fetches what is not there yet; the others find it."""
    with failing_together(workers):
        dataset = load(config.data, data_dir) if launch.local_rank == 0 else None
    with failing_together(workers):
        return dataset or load(config.data, data_dir, progress=False)


class _Display:
    """Turns rows of metrics into the progress bar and lines of the log."""

    def __init__(self, progress: Progress, task: TaskID, config: RunConfig) -> None:
        self._progress, self._task, self._config = progress, task, config
        self._evaluation: Row = {}

    def __call__(self, row: Row) -> None:
        if row["kind"] == "evaluation":
            self._evaluation = row
            say(evaluation_line(row))
        elif row["kind"] == "progress":
            self._progress.update(self._task, state=state_of(row, self._evaluation))
        self._progress.update(self._task, completed=self._config.part_of_the_way(row))


def _say_how_it_ended(trainer: Trainer, launch: Launch) -> None:
    path = trainer.folder.path
    shown = quote(str(path))
    if trainer.end is None:
        resumption = f"{launch.command()} train --resume {shown}"
        say(f"Interrupted at update {trainer.update}. Go on: {resumption}")
    elif trainer.end["reason"] == "diverged":
        complain(f"diverged: {trainer.end['message']}. The run is in {path}")
    else:
        say(f"Run: {path}\nPage: kfc report {shown}")


def _exit_code(trainer: Trainer) -> int:
    if trainer.end is None:
        return INTERRUPTED
    return DIVERGED if trainer.end["reason"] == "diverged" else 0
