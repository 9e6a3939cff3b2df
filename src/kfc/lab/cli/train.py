"""The command `kfc train`, which trains one run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from kfc.distributed.ranks import Ranks
from kfc.lab.cli import screen
from kfc.lab.cli.options import Create, DataDir, TrustNet, parameter, parser, with_options
from kfc.lab.components import require_network
from kfc.lab.config import (
    LIMITS,
    OPTIMIZER,
    OPTIONS,
    RECORDS,
    Length,
    RunConfig,
    config_from_dict,
    make_config,
)
from kfc.lab.data import load
from kfc.lab.data.loading import create_data_folder
from kfc.lab.disk import RunError
from kfc.lab.networks import require_trusted
from kfc.lab.optimizers import all_optimizer_options
from kfc.lab.options import ConfigError, Option, duration
from kfc.lab.processes.ranks import Launch, failing_together, joined
from kfc.lab.runs import RemoteFolder, RunFolder, is_of_job, read_end
from kfc.lab.training import Trainer

DEFAULT_TIMEOUT = 300.0


def train_parameters() -> Iterator[inspect.Parameter]:
    """Yield a parameter for every option of a run and of every optimizer."""
    for declared in OPTIONS.values():
        yield parameter(declared)
        if declared.name == "weight_decay":
            for owners in all_optimizer_options().values():
                defaults = {optimizer: each.default for optimizer, each in owners.items()}
                yield parameter(_of_all(owners), panel=OPTIMIZER, defaults=defaults)


def _of_all(owners: Mapping[str, Option]) -> Option:
    """Return an option of several optimizers, whose help says what it means to each of them."""
    meanings: dict[str, list[str]] = {}
    for optimizer, declared in owners.items():
        meanings.setdefault(declared.help, []).append(optimizer)
    option = next(iter(owners.values()))
    if len(meanings) == 1:
        return option
    parts = [f"{text} ({', '.join(names)})" for text, names in meanings.items()]
    return replace(option, help="; ".join(parts))


TIMEOUT = typer.Option(
    help="Longest time that a process may wait for the others under torchrun; by default 5m.",
    parser=parser(duration),
    metavar="<duration>",
    rich_help_panel=RECORDS,
)
OUT = typer.Option(help="Folder of the run; it must not exist.", rich_help_panel=RECORDS)
RESUME = typer.Option(
    help="Continue the run in this folder; only its length may be changed.",
    rich_help_panel=RECORDS,
)
RESTART = typer.Option(
    "--restart",
    help="With --resume: begin the run again, and discard its metrics and checkpoints.",
    rich_help_panel=RECORDS,
)


@with_options(train_parameters())
def train(
    data_dir: DataDir = None,
    create: Create = False,
    timeout: Annotated[float | None, TIMEOUT] = None,
    out: Annotated[Path | None, OUT] = None,
    resume: Annotated[Path | None, RESUME] = None,
    restart: Annotated[bool, RESTART] = False,
    trust_net: TrustNet = False,
    **values: Any,
) -> None:
    """Train one network with one optimizer, and record the run in a folder.

    Ctrl-C saves a checkpoint and ends the run. --resume continues from the
    last checkpoint, also after a crash, as if the run had not been interrupted.
    If the run has a network of your own, name it again with --net.

    torchrun trains in several processes, each with its part of every batch:
    on the CPU, or with --device cuda on one GPU each. With --max-restarts,
    torchrun restarts after a failure from the last checkpoint. --resume works
    with any number of processes.

    Examples:

      kfc train --data digits --epochs 5

      kfc train --data cifar10 --net cuda-convnet --optimizer sgd --lr 0.001 --time 10m

      kfc train --data cifar10 --net mynets:small --lr 0.003 --damping 0.01 --out runs/mine

      kfc train --resume runs/mine --net mynets:small --epochs 20

      torchrun --nproc-per-node=2 --max-restarts=3 -m kfc train --data cifar10 --time 1h
    """
    given = {name: value for name, value in values.items() if value is not None}
    _require_settings_kept(given, out, resume, restart=restart)
    launch = Launch.from_environment()
    with screen.clear_errors():
        if create:
            create_data_folder(data_dir)
        with joined(launch, timeout or DEFAULT_TIMEOUT) as ranks:
            with failing_together(ranks):
                own = None
                if ranks.rank == 0 and resume is not None:
                    own = _plan_to_continue(resume, given, launch, restart=restart, trust=trust_net)
                elif ranks.rank == 0:
                    own = _plan_to_start(make_config(**given), out, launch)
                if own is not None:
                    require_network(own.config)
            trainer = _run(_shared(own, ranks), data_dir, launch, ranks)
            code = _print_end(trainer, launch)
        raise typer.Exit(code)


def _require_settings_kept(
    given: dict[str, Any], out: Path | None, resume: Path | None, *, restart: bool
) -> None:
    """Raise an error if a setting is given for a run that is resumed."""
    if restart and resume is None:
        raise typer.BadParameter("must be given with --resume", param_hint="--restart")
    allowed = (*LIMITS, "net")
    fixed = [name for name in [*given, *(["out"] if out else [])] if name not in allowed]
    if resume is not None and fixed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise typer.BadParameter(
            f"a resumed run keeps its settings, so {options} cannot be given; only its length "
            "can: --epochs, --updates, --time",
            param_hint="--resume",
        )


@dataclass(frozen=True)
class Plan:
    """The run to train.

    Attributes:
        folder: the folder of a run to continue; ``None`` for a new run.
        restarted: whether the launcher has started the same command before.
        from_beginning: whether to discard what the run to continue has done.
    """

    path: Path
    config: RunConfig
    folder: RunFolder | RemoteFolder | None
    restarted: bool = False
    from_beginning: bool = False


def _plan_to_start(config: RunConfig, out: Path | None, launch: Launch) -> Plan:
    """Plan a new run, or the one that this command began before torchrun restarted it."""
    default = (
        Path("runs")
        / f"{config.problem.data}-{config.problem.net.replace(':', '-')}-{config.method.optimizer}"
    )
    for path in [out] if out else takewhile(Path.exists, screen.numbered(default)):
        # Each machine counts restarts for itself; but another job may have the same name later.
        if is_of_job(path, config, launch.job) and (launch.restarted or not read_end(path)):
            _refuse_diverged(path, launch)
            return Plan(path, config, RunFolder(path), restarted=True)
    return Plan(out or screen.free_path(default), config, None)


def _length(given: dict[str, Any]) -> Length:
    return Length(*(given.get(name) for name in LIMITS))


def _plan_to_continue(
    path: Path, given: dict[str, Any], launch: Launch, *, restart: bool, trust: bool
) -> Plan:
    """Plan to continue a run, or to begin it again; nothing in its folder changes yet."""
    folder = RunFolder(path, _length(given))
    net, named = folder.config.problem.net, given.get("net")
    if named not in (None, net):
        raise ConfigError(f"net: a resumed run keeps its network, {net}; got {named}")
    require_trusted(net, path, [named] if named else [], trust=trust)
    _refuse_diverged(path, launch)
    restart = restart and not launch.restarted  # the launcher repeats the whole command
    state = None if restart else folder.newest()
    last = state["last_evaluation"] if state else {}
    is_new_limit = not launch.restarted and bool(given.keys() & set(LIMITS))
    if is_new_limit and last and folder.config.length.fraction_done(last) > 1:
        position = f"epoch {last['epoch']:.4g}, update {last['update']}, {last['seconds']:.1f} s"
        raise RunError(f"{path} has already passed the new limit: it is at {position}")
    return Plan(path, folder.config, folder, launch.restarted, from_beginning=restart)


def _shared(plan: Plan | None, ranks: Ranks) -> Plan:
    """Return rank 0's plan on all ranks; the others need not have access to its disk."""
    content: dict[str, Any] = {}
    if plan is not None:
        digest = plan.folder.data_digest if plan.folder else None
        content = {
            "path": str(plan.path),
            "config": plan.config.to_dict(),
            "digest": digest,
            "from_beginning": plan.from_beginning,
        }
    content = ranks.share(content)
    if plan is not None:
        return plan
    path, config = Path(content["path"]), config_from_dict(content["config"])
    folder = RemoteFolder(path, config, content["digest"]) if content["digest"] else None
    return Plan(path, config, folder, from_beginning=content["from_beginning"])


def _refuse_diverged(path: Path, launch: Launch) -> None:
    """Raise ``RunError`` if torchrun has restarted a run that would diverge again."""
    end = read_end(path) if launch.restarted else None
    if end is not None and end["reason"] == "diverged":
        raise RunError(f"{path} has diverged and is not continued: {end['message']}")


def _run(plan: Plan, data_dir: Path | None, launch: Launch, ranks: Ranks) -> Trainer:
    """Train to the end, or until interrupted."""
    with failing_together(ranks):  # only the first process of each machine downloads the data
        dataset = load(plan.config.problem.data, data_dir) if launch.local_rank == 0 else None
    with failing_together(ranks):
        dataset = dataset or load(plan.config.problem.data, data_dir, progress=False)
    silent = ranks.rank > 0
    if silent:  # all ranks have the same warnings
        warnings.simplefilter("ignore")
    with (
        screen.progress_bars(hidden=silent) as progress,
        screen.interruptions(patient=launch.job is not None) as interrupted,
    ):
        show = (
            None
            if silent
            else screen.RunDisplay(progress, plan.config.method.optimizer, plan.config)
        )
        if plan.folder is None:
            trainer = Trainer.start(
                *(plan.path, plan.config, dataset), name=plan.path.name, on_row=show, ranks=ranks
            )
        else:
            trainer = Trainer.resume(
                plan.folder, dataset, restart=plan.from_beginning, on_row=show, ranks=ranks
            )
            if isinstance(plan.folder, RunFolder) and plan.folder.note:
                screen.print_warning(plan.folder.note)
            if plan.restarted and not silent:
                screen.say(f"Restarted: {plan.path} continues from update {trainer.update}")
        try:
            if trainer.advance(interrupted=interrupted):
                trainer.save()
        finally:
            trainer.close()
    return trainer


def _print_end(trainer: Trainer, launch: Launch) -> int:
    """Print on rank 0 how the run ended; return the exit code."""
    path = trainer.folder.path
    if trainer.end is None:
        net = trainer.folder.config.problem.net
        again = f" --net {quote(net)}" if ":" in net else ""
        command = f"{launch.command()} train --resume {quote(str(path))}{again}"
        message = f"Interrupted at update {trainer.update}. To continue: {command}"
        code = screen.OUTPUT_CLOSED if screen.console.is_closed else screen.INTERRUPTED
    elif trainer.end["reason"] == "diverged":
        message = f"diverged: {trainer.end['message']}. The run is in {path}"
        code = screen.DIVERGED
    else:
        message, code = f"Run: {path}\nPage: kfc report {quote(str(path))}", 0
    if launch.rank == 0:
        (screen.print_error if code == screen.DIVERGED else screen.say)(message)
    return code
