"""The command `kfc inspect`, which measures how good the Fisher approximations are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import torch
import typer

from kfc.lab.cli import screen
from kfc.lab.cli.options import Create, DataDir, TrustNet, parameter, with_options
from kfc.lab.cli.report import with_distinct_names
from kfc.lab.components import require_network
from kfc.lab.config import OPTIONS, RunConfig, make_config
from kfc.lab.data import load
from kfc.lab.data.loading import create_data_folder
from kfc.lab.inspection.advice import DEFAULT_OVERHEAD, TRAINABLE
from kfc.lab.inspection.advice import advise as advice_for
from kfc.lab.inspection.networks import PARAMETERS, InspectedNetwork, inspected_network
from kfc.lab.inspection.results import FORMAT, PANEL, Inspection, InspectionSettings
from kfc.lab.inspection.runner import FIRST_STEP, inspect_network, selected_layers
from kfc.lab.networks import require_trusted
from kfc.lab.options import ConfigError, not_one_of, options_of
from kfc.lab.report import inspection as report
from kfc.lab.report.advice import advice_notes, advice_rows
from kfc.lab.runs import Record, read_record

PAGE = Path("inspect.html")
UNTRAINED = "An untrained network instead of a run"
SETTINGS = options_of(InspectionSettings)
# Shorter than the page's header; Frobenius and operator are errors.
HEADER = tuple(name.removesuffix(" error").removesuffix(" ratio") for name in report.QUALITIES)
Runs = Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="Folders of runs.")]
Nets = Annotated[
    list[str] | None,
    typer.Option(
        help=f"{OPTIONS['net'].help}; may be repeated. With runs: the network of your own in them.",
        rich_help_panel=UNTRAINED,
    ),
]
Parameters = Annotated[
    str | None,
    typer.Option(help="Parameters of a run: averaged (default) or raw.", rich_help_panel=PANEL),
]
Advise = Annotated[
    bool,
    typer.Option(
        "--advise",
        help="Also advise how to train each network, and print a command for it.",
        rich_help_panel=PANEL,
    ),
]
Overhead = Annotated[
    float | None,
    typer.Option(
        help="Time that curvature may add to a training step, as a fraction, for --advise "
        f"(default: {DEFAULT_OVERHEAD:g}).",
        rich_help_panel=PANEL,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help=f"HTML page to write; default: {PAGE}, none with --json."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON in place of tables; all else goes to stderr.")
]


@with_options(
    [
        *(parameter(OPTIONS[name], panel=UNTRAINED) for name in ("data", "init")),
        *(parameter(declared) for declared in SETTINGS.values()),
        *(parameter(OPTIONS[name], panel="Machine", defaults={}) for name in ("device", "threads")),
    ]
)
def inspect(
    runs: Runs = None,
    net: Nets = None,
    trust_net: TrustNet = False,
    parameters: Parameters = None,
    advise: Advise = False,
    overhead: Overhead = None,
    out: Out = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
    create: Create = False,
    **values: Any,
) -> None:
    """Measure what each assumption of the Fisher approximations loses, layer by layer.

    Inspects the networks of runs, or untrained ones. Prints a table of
    verdicts, and for each layer how far each approximation is from the exact
    block of the Fisher matrix. Writes a page with correlations over space and
    between maps, spectra and tables. Several networks are shown side by side.
    Takes five minutes for each network, or the time of --budget.

    Examples:

      kfc inspect runs/cifar10-cuda-convnet-kfc

      kfc inspect runs/max runs/average -o pooling.html

      kfc inspect --net cuda-convnet --data cifar10 --layer conv2 --budget 90s

      kfc inspect runs/max --advise --overhead 0.1

      kfc inspect runs/max --layer conv2 --json | jq '.inspections[0].layers[0].assumptions'
    """
    given = {name: value for name, value in values.items() if value not in (None, [])}
    with screen.clear_errors():
        if create:
            create_data_folder(data_dir)
        page = out or (None if as_json else PAGE)
        if page is not None:
            screen.require_page(page)
        if overhead is not None:
            _require_overhead(overhead, advise)
        settings = _settings({name: given.pop(name) for name in SETTINGS if name in given})
        if advise:
            _require_trainable(settings.approximations)
        if (threads := given.pop("threads", None)) is not None:
            OPTIONS["threads"].check(threads)
            torch.set_num_threads(threads)
        chosen = _chosen(runs, net, parameters, given, settings.seed)
        for config, record in chosen:
            if record is not None:
                require_trusted(config.problem.net, record.path, net or (), trust=trust_net)
            require_network(config)
        networks = _networks(chosen, parameters or PARAMETERS[0], settings, data_dir)
        if page is not None:  # before the work begins
            _require_writable(page)
        found = _inspect(networks, settings)
        if advise:
            found = _advised(networks, found, overhead or DEFAULT_OVERHEAD)
        _publish(found, page, as_json)


def _advised(
    networks: Sequence[InspectedNetwork], found: Sequence[Inspection], overhead: float
) -> list[Inspection]:
    """Return the inspections with advice."""
    pairs = zip(networks, found, strict=True)
    return [replace(one, advice=advice_for(network, one, overhead)) for network, one in pairs]


def _require_overhead(overhead: float, advise: bool) -> None:
    if not advise:
        raise typer.BadParameter("--overhead has no effect without --advise")
    if not 0 < overhead < math.inf:
        raise typer.BadParameter(
            f"must be a positive number, got {overhead:g}", param_hint="--overhead"
        )


def _require_trainable(approximations: Sequence[str]) -> None:
    if set(approximations).isdisjoint(TRAINABLE):
        raise typer.BadParameter(
            f"--advise needs one that training offers ({', '.join(TRAINABLE)}), got "
            f"{', '.join(approximations)}",
            param_hint="--approximation",
        )


def _settings(chosen: dict[str, Any]) -> InspectionSettings:
    """Return the settings, without repeated layers and approximations."""
    for name in ("layers", "approximations"):
        if name in chosen:
            chosen[name] = tuple(dict.fromkeys(chosen[name]))
    return InspectionSettings(**chosen)


def _chosen(
    runs: list[Path] | None,
    nets: list[str] | None,
    parameters: str | None,
    options: dict[str, Any],
    seed: int,
) -> list[tuple[RunConfig, Record | None]]:
    """Return the runs to inspect, or the configurations of untrained networks."""
    own = nets and all(":" in net for net in nets)  # which may belong to the runs
    described = bool(options.keys() - {"device"} or (nets and not (runs and own)))
    if bool(runs) == described:
        raise typer.BadParameter("name either folders of runs, or --net and --data")
    if not runs and parameters is not None:
        raise typer.BadParameter("--parameters has no effect on an untrained network")
    if parameters not in (None, *PARAMETERS):
        raise ConfigError(not_one_of("parameters", parameters, PARAMETERS))
    if runs:
        records = with_distinct_names([[read_record(path)] for path in runs])
        return [(record.config.with_options(**options), record) for record in records]
    configs = [{"net": net} for net in nets] if nets else [{}]
    return [(make_config(**net, **options, seed=seed), None) for net in configs]


def _networks(
    chosen: Sequence[tuple[RunConfig, Record | None]],
    parameters: str,
    settings: InspectionSettings,
    data_dir: Path | None,
) -> list[InspectedNetwork]:
    """Return the networks, after checking that they have the layers to inspect."""
    networks = [
        inspected_network(config, load(config.problem.data, data_dir), settings, record, parameters)
        for config, record in chosen
    ]
    for network in networks:
        selected_layers(network, settings)
    return networks


def _require_writable(page: Path) -> None:
    """Fail unless the page can be written; leave nothing behind."""
    folders = (page.parent, *page.parent.parents)
    missing = [folder for folder in folders if not os.path.lexists(folder)]
    with screen.writing(page), ExitStack() as undoing:
        for folder in reversed(missing):
            folder.mkdir()
            undoing.callback(folder.rmdir)
        undoing.enter_context(NamedTemporaryFile(dir=page.parent))


def _inspect(
    networks: Sequence[InspectedNetwork], settings: InspectionSettings
) -> list[Inspection]:
    found = []
    with screen.progress_bars(screen.errors) as progress:
        for network in networks:
            task = progress.add_task(screen.shown(network.label), total=1.0, state="")

            def show(
                layer: str, step: str, part: float, label: str = network.label, task: Any = task
            ) -> None:
                progress.update(task, completed=part, state=screen.shown(f"{layer}: {step}"))
                if step == FIRST_STEP and not screen.errors.is_terminal:  # there is no moving bar
                    screen.say(f"{label}: {layer}", on=screen.errors)

            found.append(inspect_network(network, settings, show))
            progress.update(task, completed=1.0, state="done")
    return found


def _publish(found: Sequence[Inspection], page: Path | None, as_json: bool) -> None:
    """Print tables or JSON, and write the page."""
    if as_json:
        content = {"format": FORMAT, "inspections": [one.to_json() for one in found]}
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        for inspection in found:
            _print(inspection)
    if page is None:
        return
    title = "Inspection of " + " and ".join(dict.fromkeys(one.label for one in found))
    with screen.writing(page):
        report.write_inspection_page(page, found, title)
    screen.say(f"Page: {page.resolve()}", on=screen.errors if as_json else screen.console)


def _print(inspection: Inspection) -> None:
    verdicts = [
        (layer, *(cell.replace(" (", "\n(").replace(") ", ")\n") for cell in cells))
        for layer, *cells in report.verdict_rows(inspection)
    ]
    tables = [(inspection.label, verdicts)]
    for layer in inspection.layers:
        if layer.comparison is not None:
            rows = [HEADER, *report.quality_rows(layer.comparison)[1:]]
            tables.append((f"{inspection.label}, {layer.name} ({layer.kind})", rows))
    if inspection.advice is not None:
        tables.append((f"{inspection.label}: advice", advice_rows(inspection.advice)))
    for title, rows in tables:
        table = screen.as_table(rows, screen.shown(title), compact=True)
        screen.console.print(table, highlight=False)
    for note in [*report.notes_of(inspection), *advice_notes(inspection.advice)]:
        screen.say(note)
