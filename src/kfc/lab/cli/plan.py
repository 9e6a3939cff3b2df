"""The command `kfc plan`, which predicts what training with KFC takes on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

import kfc
from kfc.distributed.options import PLACEMENTS, PlacementKind
from kfc.lab.cli import screen
from kfc.lab.networks import NetworkError, require_known
from kfc.lab.planning.check import Subject, measured_step, seconds_of_passes, settled
from kfc.lab.planning.machine import Machine, measure_machine
from kfc.lab.planning.prediction import Task, predict, predict_all
from kfc.lab.report.plan import Checked, Plan, check_rows, summary_rows, write_plan_page

PAGE = Path("plan.html")
RANKS = tuple(2**power for power in range(11))
MOST_RANKS = 1024


Net = Annotated[str, typer.Argument(help="A network by name, or module:function for your own.")]
Image = Annotated[str, typer.Option(help="Channels, height and width of inputs.")]
Ranks = Annotated[
    str | None, typer.Option(help="Comma-separated numbers of ranks. Default: 1,2,4,...,1024.")
]
Network = Annotated[
    float | None,
    typer.Option(help="Bandwidth of a rank in GB/s. Default: measured between two processes."),
]
Latency = Annotated[
    float | None,
    typer.Option(help="Latency of a message in µs. Default: measured between two processes."),
]
Check = Annotated[
    str | None,
    typer.Option(help="Also train on this many processes here, such as 1,2,4, and compare."),
]


def plan(
    net: Net = "resnet20",
    image: Image = "3x32x32",
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per rank.")] = 128,
    ranks: Ranks = None,
    network: Network = None,
    latency: Latency = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    check: Check = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML page to write.")] = PAGE,
) -> None:
    """Predict the time, memory and traffic of steps with KFC on 1 to 1,024 ranks.

    Measures this machine (matrix products, Cholesky decompositions, memory,
    messages between two processes) and a step of SGD with the network, and
    counts the work of the curvature from the shapes of the layers. Prints a
    table with all placements of inverses, and writes a page with figures.

    Examples:

      kfc plan resnet20 --batch-size 128

      kfc plan mymodels:resnet50 --image 3x224x224 --classes 1000 --network 12 --latency 5

      kfc plan cuda-convnet --batch-size 256 --check 1,2,4
    """
    with screen.clear_errors():
        screen.require_page(out)
        subject = Subject(net, _image(image), classes, batch_size)
        require_known(net)
        sizes = RANKS if ranks is None else _counts("--ranks", ranks)
        checked = () if check is None else _counts("--check", check)
        for name, value in (("--network", network), ("--latency", latency)):
            if value is not None and not value > 0:
                raise typer.BadParameter(f"must be positive, got {value:g}", param_hint=name)
        torch.set_num_threads(threads)
        machine, task = _measured(subject, network, latency)
        found = Plan(
            f"{net}, batches of {batch_size}",
            batch_size,
            machine,
            predict_all(task, machine, sizes),
            _compared(subject, task, machine, checked, threads),
        )
        title = f"{found.title}: milliseconds of a step by placement, and details of auto"
        screen.console.print(screen.as_table(summary_rows(found), title, compact=True))
        if found.checked:
            screen.console.print(screen.as_table(check_rows(found), "On this machine"))
        with screen.writing(out):
            write_plan_page(out, found)
        screen.say(f"The page is in {out}")


def _measured(
    subject: Subject, network: float | None, latency: float | None
) -> tuple[Machine, Task]:
    screen.say("Measuring the machine and a step of SGD")
    try:
        passes = seconds_of_passes(subject)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, NetworkError):
            raise
        shape = "x".join(map(str, subject.image))
        raise NetworkError(
            f"{subject.network} failed on images of {shape} with {subject.classes} classes: "
            f"{error}; pass the size of its inputs with --image, and --classes"
        ) from error
    machine = measure_machine(
        None if network is None else 1e9 * network, None if latency is None else 1e-6 * latency
    )
    optimizer = kfc.KFC(
        subject.model(), schedule=settled(), parallel=kfc.Parallel(group=None), seed=0
    )
    return machine, Task.of(optimizer.engine, subject.data()[0], passes)


def _compared(
    subject: Subject, task: Task, machine: Machine, counts: Sequence[int], threads: int
) -> list[Checked]:
    """Return predictions and measurements of processes that share the cores of this machine.

    Predictions take the time of SGD's passes in these processes, relative to that in a process
    alone, for the contention of all other work.
    """
    found = []
    for ranks in counts:
        placements: Sequence[PlacementKind] = PLACEMENTS if ranks > 1 else PLACEMENTS[:1]
        for placement in placements:
            screen.say(f"Training on {ranks} process{'es' if ranks > 1 else ''}, {placement}")
            passes, step = measured_step(subject, ranks, placement, threads)
            predicted = predict(task, machine, ranks, placement, passes / task.passes)
            found.append(Checked(predicted, step))
    return found


def _image(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(part) for part in text.split("x"))
    except ValueError:
        raise typer.BadParameter(
            f"must be three numbers such as 3x32x32, got {text!r}", param_hint="--image"
        ) from None
    if min(channels, height, width) < 1:
        raise typer.BadParameter(f"must be positive, got {text!r}", param_hint="--image")
    return channels, height, width


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > MOST_RANKS:
        raise typer.BadParameter(
            f"must be whole numbers from 1 to {MOST_RANKS}, such as 1,2,4; got {text!r}",
            param_hint=option,
        )
    return counts
