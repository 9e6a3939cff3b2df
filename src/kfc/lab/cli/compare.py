"""The commands `kfc compare` and `kfc demo`, which train several optimizers on one problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from kfc.lab.cli import screen
from kfc.lab.cli.options import Create, DataDir, TrustNet, parameter, with_options
from kfc.lab.cli.report import publish
from kfc.lab.comparison import settings
from kfc.lab.comparison.runner import ComparedRun, ComparisonRunner
from kfc.lab.components import require_network
from kfc.lab.config import LIMITS, OPTIONS
from kfc.lab.data import load
from kfc.lab.data.loading import create_data_folder
from kfc.lab.networks import require_trusted
from kfc.lab.options import config_errors
from kfc.lab.report.summary import best_runs
from kfc.lab.runs import read_end
from kfc.lab.training import Row

PAGE = "report.html"
OVERRIDES = ("seed", "epochs", "seconds", "device", "threads", "workers")
PANEL = "Overrides of the preset or file, for all runs"
WHAT = typer.Argument(
    metavar="PRESET|FILE.toml",
    help=f"Presets: {', '.join(settings.preset_names())}; or suite, which has its own options: "
    "kfc compare suite --help.",
)
RESUME = typer.Option(help="Continue this comparison; --epochs or --time can make it longer.")
NET = typer.Option(
    help="With --resume: a network of your own that the comparison uses; may be repeated."
)


@with_options(parameter(OPTIONS[name], panel=PANEL, defaults={}) for name in OVERRIDES)
def compare(
    what: Annotated[str | None, WHAT] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a smaller version, ten minutes on two cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison; it must not exist.")
    ] = None,
    resume: Annotated[Path | None, RESUME] = None,
    net: Annotated[list[str] | None, NET] = None,
    trust_net: TrustNet = False,
    data_dir: DataDir = None,
    create: Create = False,
    **overrides: Any,
) -> None:
    """Train with several optimizers on the same data, from the same weights, in the same order.

    The runs train in turn in short slices, so that other load on the machine
    affects them equally. Of several learning rates of a method, the half with
    the lowest training losses continues after a while, until one is left. At the
    end, a table and a page show what it took to reach the given errors.

    Examples:

      kfc compare figure3-cifar10 --quick

      kfc compare mine.toml --out runs/mine

      kfc compare --resume runs/mine

      kfc compare --resume runs/mine --time 20m
    """
    with screen.clear_errors():
        if create:
            create_data_folder(data_dir)
        if resume is not None:
            given = {name for name, value in overrides.items() if value is not None}
            if what is not None or quick or out is not None or given - set(LIMITS):
                raise typer.BadParameter(
                    "a resumed comparison keeps its settings; only the length of its runs can be "
                    "changed: --epochs, --time",
                    param_hint="--resume",
                )
            _continue(resume, overrides, data_dir, net or (), trust=trust_net)
        elif net:
            raise typer.BadParameter("is only for --resume; the file names it", param_hint="--net")
        elif what is not None:
            _start(what, quick, overrides, out, data_dir)
        else:
            raise typer.BadParameter(
                f"name a preset ({', '.join(settings.preset_names())}) or a .toml file",
                param_hint="PRESET|FILE.toml",
            )


@with_options(parameter(OPTIONS[name], panel="Options", defaults={}) for name in ("epochs", "seed"))
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder; by default runs/demo, runs/demo-2, ...")
    ] = None,
    **overrides: Any,
) -> None:
    """Train a small network on the embedded digits with SGD, Adam, KFC, KFAC and WhitenedAdam.

    Example: kfc demo --epochs 30 --out runs/longer
    """
    with screen.clear_errors():
        _start("demo", False, overrides, out, None)


def _start(
    what: str, quick: bool, overrides: Mapping[str, Any], out: Path | None, data_dir: Path | None
) -> None:
    comparison = settings.read_comparison(what, quick=quick, overrides=overrides)
    name = Path(what).stem + ("-quick" if quick else "")
    _run(comparison, out or screen.free_path(Path("runs") / name), data_dir)


def _continue(
    folder: Path,
    overrides: Mapping[str, Any],
    data_dir: Path | None,
    named: Sequence[str],
    *,
    trust: bool,
) -> None:
    comparison = settings.read_specification(folder)
    for net in _networks(comparison):
        require_trusted(net, folder, named, trust=trust)
    _run(settings.with_overrides(comparison, overrides), folder, data_dir, replaces=comparison)


def _networks(comparison: settings.Comparison) -> list[str]:
    """Return the networks of all runs, each once."""
    configs = (config for each in comparison.candidates().values() for config in each)
    return list(dict.fromkeys(config.problem.net for config in configs))


def _run(
    comparison: settings.Comparison,
    folder: Path,
    data_dir: Path | None,
    replaces: settings.Comparison | None = None,
) -> None:
    """Run to the end and publish the results, or until interrupted.

    Args:
        replaces: the definition in the folder of a comparison to continue; ``None`` if it is new.
    """
    candidates = comparison.candidates()
    for method, configs in candidates.items():
        with config_errors(f"method {method}: "):
            require_network(configs[0])
    data = load(next(iter(candidates.values()))[0].problem.data, data_dir)
    displays: dict[ComparedRun, screen.RunDisplay] = {}
    if comparison.introduction:
        screen.say(comparison.introduction)

    def show(run: ComparedRun, row: Row) -> None:
        displays[run](row)
        if row["kind"] == "end" and row["reason"] == "diverged":
            screen.say(f"{run.label} diverged: {row['message']}")

    with screen.progress_bars() as progress, screen.interruptions() as interrupted:
        runner = ComparisonRunner(comparison, folder, data, show, interrupted)
        if replaces is None:
            runner.check()
            settings.write_specification(folder, comparison)
        for run in runner.runs:
            displays[run] = screen.RunDisplay(progress, run.label, run.config, f"{run.label} ")
            if run.path.exists() and (end := read_end(run.path)):
                displays[run](end)

        def note_start() -> None:
            for run in runner.runs:
                if run.note:
                    screen.print_warning(f"{run.label}: {run.note}")
            if replaces not in (None, comparison):
                settings.replace_specification(folder, comparison)

        finished = runner.run(note_start)
    if not finished:
        own = "".join(f" --net {quote(net)}" for net in _networks(comparison) if ":" in net)
        screen.say(f"Interrupted. To continue: kfc compare --resume {quote(str(folder))}{own}")
        closed = screen.console.is_closed
        raise typer.Exit(screen.OUTPUT_CLOSED if closed else screen.INTERRUPTED)
    records = runner.records()
    publish(records, folder / PAGE, comparison)
    ends = [record.end or {} for record in best_runs(records)]
    if all(end.get("reason") == "diverged" for end in ends):
        screen.fail("all runs diverged", screen.DIVERGED)
