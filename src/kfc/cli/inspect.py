"""`kfc inspect`: how good the approximation is, on a trained or a fresh network."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from kfc.analysis import APPROXIMATIONS
from kfc.cli.report import with_distinct_names
from kfc.cli.screen import FAILED, as_table, clear_errors, console, errors, fail, progress_bars, say
from kfc.experiments.config import ConfigError, make_config
from kfc.experiments.data import NAMES, load
from kfc.experiments.findings import FORMAT, Inspection, InspectionSettings
from kfc.experiments.inspection import STEPS, chosen_layers, inspect_network
from kfc.experiments.networks import NETWORKS
from kfc.experiments.runs import read_record
from kfc.experiments.subjects import PARAMETERS, Subject, fresh_subject, run_subject
from kfc.report.inspection import write_inspection_page
from kfc.report.verdicts import notes_of, quality_rows, verdict_rows

PAGE = Path("inspect.html")
DEFAULTS = InspectionSettings()
# Shorter than the page's; Frobenius and operator are errors.
TERMINAL_HEADER = (
    *("approximation", "assumes", "Frobenius", "operator"),
    *("cosine", "decrease", "trace", "PSD"),
)


def _of_network(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="A fresh network instead of a run")


def _of_inspection(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Inspection")


def _of_machine(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Machine")


def inspect(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Folders of runs.")
    ] = None,
    net: Annotated[
        list[str] | None,
        _of_network(f"{', '.join(NETWORKS)}; or your own as module:function; may be repeated."),
    ] = None,
    data: Annotated[str | None, _of_network(f"One of {', '.join(NAMES)}.")] = None,
    init: Annotated[str | None, _of_network("As in kfc train.")] = None,
    seed: Annotated[
        int, _of_inspection("Of drawn targets, and of the weights of a fresh network.")
    ] = 0,
    layer: Annotated[
        list[str] | None, _of_inspection("Its name, such as conv2; may be repeated; else all.")
    ] = None,
    examples: Annotated[
        int, _of_inspection("The first so many of the training set.")
    ] = DEFAULTS.examples,
    samples: Annotated[
        int, _of_inspection("Targets drawn for each example, for assumptions and correlations.")
    ] = DEFAULTS.samples,
    samples_exact: Annotated[
        int | None,
        _of_inspection("Likewise for the blocks; by default all targets, so that they are exact."),
    ] = None,
    damping: Annotated[
        float, _of_inspection("Of the natural gradients that are compared.")
    ] = DEFAULTS.damping,
    approximation: Annotated[
        list[str] | None,
        _of_inspection(f"{', '.join(APPROXIMATIONS)}; may be repeated; by default all."),
    ] = None,
    reach: Annotated[
        int, _of_inspection("How far apart locations are looked at, in pixels.")
    ] = DEFAULTS.reach,
    parameters: Annotated[
        str | None, _of_inspection("Of a run: averaged (the default), or raw.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=f"The page; by default {PAGE}, with --json none."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of tables, and nothing else.")
    ] = False,
    memory: Annotated[float, _of_machine("GiB, for each of the largest arrays.")] = DEFAULTS.memory,
    device: Annotated[
        str | None, _of_machine("cpu, cuda, mps, ...; by default the run's, or cpu.")
    ] = None,
    threads: Annotated[int | None, _of_machine("By default as many as torch takes.")] = None,
    data_dir: Annotated[Path | None, _of_machine("Where data sets are; see kfc data.")] = None,
) -> None:
    """Which assumptions behind the approximation hold, where, and how good it is.

    Takes trained networks from the checkpoints of runs, or fresh ones. Prints a table of
    verdicts, and for each layer how far each approximation is from the exact block of the
    Fisher matrix; writes a page with correlations over space and between maps, spectra and
    tables. Several runs stand side by side.

    Examples:

      kfc inspect runs/cifar10-cuda-convnet-kfc

      kfc inspect runs/max runs/average -o pooling.html

      kfc inspect --net cuda-convnet --data cifar10 --layer conv2 --examples 64

      kfc inspect runs/max --layer conv2 --json | jq '.inspections[0].layers[0].assumptions'
    """
    with clear_errors():
        page = out or (None if as_json else PAGE)
        if page is not None and page.is_dir():
            raise typer.BadParameter(f"{page} is a folder; name a file", param_hint="--out")
        settings = InspectionSettings(
            examples=examples,
            samples=samples,
            exact_samples=samples_exact,
            damping=damping,
            layers=tuple(layer or ()),
            approximations=tuple(dict.fromkeys(approximation or APPROXIMATIONS)),
            reach=reach,
            memory=memory,
            seed=seed,
        )
        if threads is not None:
            _set_threads(threads)
        if runs and (net or data or init):
            raise typer.BadParameter("either folders of runs, or --net and --data, not both")
        if runs:
            chosen = _choice("parameters", parameters or PARAMETERS[0], PARAMETERS)
            subjects = _of_runs(runs, settings, chosen, device, data_dir)
        elif net or data:
            if parameters is not None:
                raise typer.BadParameter("--parameters is for runs: a fresh network has one kind")
            wishes = {"data": data, "init": init, "seed": seed, "device": device}
            subjects = _of_networks(net or [None], wishes, settings, data_dir)
        else:
            raise typer.BadParameter("name folders of runs, or --net and --data")
        # All names, and the page's place, are checked before the work begins.
        for subject in subjects:
            chosen_layers(subject, settings)
        if page is not None:
            _require_writable(page)
        found = _inspect(subjects, settings)
        _publish(found, page, as_json)


def _set_threads(threads: int) -> None:
    make_config(data="digits", threads=threads)  # refuses what cannot be
    torch.set_num_threads(threads)


def _choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _of_runs(
    paths: Sequence[Path],
    settings: InspectionSettings,
    parameters: str,
    device: str | None,
    data_dir: Path | None,
) -> list[Subject]:
    records = with_distinct_names([[read_record(path)] for path in paths])
    return [
        run_subject(
            record,
            load(record.config.data, data_dir),
            examples=settings.examples,
            parameters=parameters,
            device=device,
        )
        for record in records
    ]


def _of_networks(
    names: Sequence[str | None],
    wishes: dict[str, Any],
    settings: InspectionSettings,
    data_dir: Path | None,
) -> list[Subject]:
    configs = [make_config(net=name, **wishes) for name in names]
    dataset = load(configs[0].data, data_dir)
    return [fresh_subject(config, dataset, examples=settings.examples) for config in configs]


def _require_writable(page: Path) -> None:
    """Tries it, for permissions do not tell all; nothing is left behind."""
    folders = (page.parent, *page.parent.parents)
    missing = [folder for folder in folders if not os.path.lexists(folder)]
    try:
        with ExitStack() as undoing:
            for folder in reversed(missing):
                folder.mkdir()
                undoing.callback(folder.rmdir)
            undoing.enter_context(NamedTemporaryFile(dir=page.parent))
    except OSError as error:
        _fail_to_write(page, error)


def _fail_to_write(page: Path, error: OSError) -> None:
    fail(f"the page could not be written to {page}: {error.strerror}", FAILED)


def _inspect(subjects: Sequence[Subject], settings: InspectionSettings) -> list[Inspection]:
    found = []
    with progress_bars(errors) as progress:
        for subject in subjects:
            label = escape(subject.label)
            task = progress.add_task(label, total=1.0, state="")

            def tell(
                layer: str, step: str, part: float, label: str = label, task: Any = task
            ) -> None:
                progress.update(task, completed=part, state=escape(f"{layer}: {step}"))
                if step == STEPS[0] and not errors.is_terminal:  # where no bar moves
                    errors.print(f"{label}: {escape(layer)}", highlight=False, soft_wrap=True)

            found.append(inspect_network(subject, settings, tell))
            progress.update(task, completed=1.0, state="done")
    return found


def _publish(found: Sequence[Inspection], page: Path | None, as_json: bool) -> None:
    """On the screen, or as JSON; and on a page."""
    if as_json:
        content = {"format": FORMAT, "inspections": [one.to_json() for one in found]}
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        for inspection in found:
            _print(inspection)
    if page is None:
        return
    title = "Inspection of " + " and ".join(dict.fromkeys(one.label for one in found))
    try:
        write_inspection_page(page, found, title)
    except OSError as error:
        _fail_to_write(page, error)
    say(f"Page: {page.resolve()}", on=errors if as_json else console)


def _print(inspection: Inspection) -> None:
    verdicts = [
        (layer, *(cell.replace(" (", "\n(") for cell in cells))
        for layer, *cells in verdict_rows(inspection)
    ]
    console.print(as_table(verdicts, escape(inspection.label), compact=True), highlight=False)
    for layer in inspection.layers:
        if layer.comparison is not None:
            title = f"{inspection.label}, {layer.name} ({layer.kind})"
            rows = [TERMINAL_HEADER, *quality_rows(layer.comparison)[1:]]
            console.print(as_table(rows, escape(title), compact=True), highlight=False)
    for note in notes_of(inspection):
        say(note)
