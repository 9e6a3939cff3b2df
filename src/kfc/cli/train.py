"""`kfc train`: one run."""

from __future__ import annotations

from collections.abc import Iterable
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
    evaluation_line,
    fail,
    free_path,
    parse_duration,
    progress_bars,
    say,
    state_of,
)
from kfc.experiments.config import RunConfig, make_config
from kfc.experiments.data import NAMES, load
from kfc.experiments.networks import NETWORKS
from kfc.experiments.optimizers import OPTIMIZERS
from kfc.experiments.runs import RunError, RunFolder, read_record
from kfc.experiments.training import Row, Trainer
from kfc.layers.structures import STRUCTURES


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
    batch_size: Annotated[Whole, _of_data("By default the optimizer's.")] = None,
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
    threads: Annotated[Whole, _of_records("By default as many as torch takes.")] = None,
    workers: Annotated[Whole, _of_records("Processes that prepare batches; by default 0.")] = None,
    out: Annotated[Path | None, _of_records("The run's folder; it must not exist.")] = None,
    resume: Annotated[
        Path | None, _of_records("Go on with this run; only its length may be changed.")
    ] = None,
) -> None:
    """Train one network with one optimizer, into a folder of its own.

    Ctrl-C ends the run with a checkpoint. --resume goes on from there, or after a
    crash from the last checkpoint, as if nothing had happened.

    Examples:

      kfc train --data digits --epochs 5

      kfc train --data cifar10 --net cuda-convnet --optimizer sgd --lr 0.001 --time 10m

      kfc train --data cifar10 --net mynets:small --lr 0.003 --damping 0.01 --out runs/mine

      kfc train --resume runs/mine --epochs 20
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("data_dir", "out", "resume", "time"):
        given.pop(name, None)
    seconds = parse_duration(time)
    with clear_errors():
        if resume is not None:
            _refuse_settings([*given, *(["out"] if out else [])])
            folder = RunFolder.open(resume)
            config = folder.config.with_limits(epochs, updates, seconds)
            _refuse_passed_limits(resume, config)
            folder.set_config(config)
            _run(resume, config, data_dir, folder)
        else:
            if weight_decay is not None and weight_decay != "paper":
                given["weight_decay"] = _number("--weight-decay", weight_decay)
            config = make_config(**given, seconds=seconds)
            path = out or free_path(Path("runs") / _default_name(config))
            _run(path, config, data_dir, None)


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


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(
            f'{text!r} is neither a number nor "paper"', param_hint=option
        ) from error


def _default_name(config: RunConfig) -> str:
    return f"{config.data}-{config.net.replace(':', '-')}-{config.optimizer}"


def _run(path: Path, config: RunConfig, data_dir: Path | None, folder: RunFolder | None) -> None:
    """Train to the end, or until interrupted, in a new folder or in an opened one."""
    dataset = load(config.data, data_dir)
    with progress_bars() as progress, Interruption() as interrupted:
        task = progress.add_task(escape(config.optimizer), total=1.0, state="")
        show = _Display(progress, task, config)
        if folder is None:
            trainer = Trainer.start(path, config, dataset, name=path.name, on_row=show)
        else:
            trainer = Trainer.resume(folder, dataset, on_row=show)
        try:
            if trainer.advance(interrupted=interrupted):
                trainer.save()
        finally:
            trainer.close()
    _say_how_it_ended(trainer, path)


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


def _say_how_it_ended(trainer: Trainer, path: Path) -> None:
    shown = quote(str(path))
    if trainer.end is None:
        say(f"Interrupted at update {trainer.update}. Go on: kfc train --resume {shown}")
        raise typer.Exit(INTERRUPTED)
    if trainer.end["reason"] == "diverged":
        fail(f"diverged: {trainer.end['message']}. The run is in {path}", DIVERGED)
    say(f"Run: {path}\nPage: kfc report {shown}")
