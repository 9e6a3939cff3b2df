"""The time, memory and traffic of a step, predicted from the layers of a model.

A step in the long run has four kinds of work: the user's own passes, whose time is measured;
natural gradients; and statistics and inverses, which are divided by their periods. The times of the
last three are their counted multiply-adds divided by the speed of the machine, and the time of
starting their operations. Ranks also exchange gradients, statistics, and inverses or natural
gradients: a sum of b bytes over p ranks sends 2 (p - 1) / p b from each rank in 2 (p - 1) messages
(a ring), a broadcast sends b in log₂ p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kfc.curvature.description import layer_memory
from kfc.curvature.layer import LayerCurvature
from kfc.distributed.exchange import statistics_bytes
from kfc.distributed.inverses import layer_size
from kfc.distributed.options import PLACEMENTS, PlacementKind
from kfc.distributed.placement import LayerSize, Placement, place
from kfc.lab.planning.machine import Machine
from kfc.optimizers.costs import Costs, costs_of_layer
from kfc.optimizers.engine import Engine
from kfc.optimizers.options import FisherClip
from kfc.optimizers.work import Work, expected_work
from kfc.schedule import longest

# Bytes that a natural gradient moves for each byte of parameters.
MOVED = 6.0
PASSES = "passes"
# The small operations in whose time a layer's natural gradient, statistics and inverses are
# started, and the rest of a step: on networks with small layers, they take longer than the
# multiply-adds.
NATURAL_STARTS, STATISTICS_STARTS, INVERSE_STARTS, STEP_STARTS = 60, 450, 250, 300


class Task(NamedTuple):
    """What is planned: the layers of a model, their work in a step, and the time of its passes.

    Attributes:
        layers: the curvature of every layer with a block.
        work: the work of linear and convolutional layers.
        parameters: the bytes of all trained parameters.
        passes: the seconds of a step of SGD on one rank.
        periods: the steps between refreshes of statistics and of inverses.
    """

    layers: Mapping[str, LayerCurvature]
    work: Mapping[str, Work]
    parameters: int
    passes: float
    periods: tuple[int, int]

    @classmethod
    def of(cls, engine: Engine, inputs: Any, passes: float) -> Task:
        """Return the task of steps with batches like these inputs on every rank."""
        periods, work = engine.schedule.periods, expected_work(engine, inputs)
        engine.allowance.limit_columns(engine.curvature, work)
        return cls(
            engine.curvature.layers,
            work.layers,
            sum(p.nbytes for p in engine.model.parameters() if p.requires_grad),
            passes,
            (longest(periods.statistics), longest(periods.inverse)),
        )

    def costs(self) -> dict[str, Costs]:
        """Return the counted costs of every layer that has any."""
        return {n: costs_of_layer(self.layers[n], work) for n, work in self.work.items()}


class Prediction(NamedTuple):
    """What a step takes on some ranks.

    Attributes:
        seconds: the time of each part of a step, in the mean over steps.
        memory: the bytes of factors and inverses on the rank that has most of them.
        traffic: the bytes of each kind that are sent in a step, in the mean over steps.
    """

    ranks: int
    placement: PlacementKind
    seconds: dict[str, float]
    memory: int
    traffic: dict[str, float]

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """The part, other than the passes, that takes most of the time."""
        others = {name: value for name, value in self.seconds.items() if name != PASSES}
        return max(others, key=lambda name: others[name])


def predict(
    task: Task, machine: Machine, ranks: int, placement: PlacementKind, contention: float = 1.0
) -> Prediction:
    """Return what a step takes.

    Args:
        contention: how much longer computations take than in a process alone.
    """
    every_statistics, every_inverse = task.periods
    sizes = {name: layer_size(layer) for name, layer in task.layers.items()}
    places = place(sizes, ranks, placement, every_inverse)
    costs = task.costs()
    statistics = sum(each.statistics for each in costs.values()) / machine.products
    statistics += machine.start * STATISTICS_STARTS * len(costs)
    norms = sum(each.norms for each in costs.values())
    plain = max(1.0, sum(each.plain for each in costs.values()))
    inverses = _inverse_seconds(task, machine, costs)
    natural = _natural_seconds(machine, costs, sizes)
    kept = {name for name, where in places.items() if where.kept}
    computed = {
        PASSES: task.passes,
        "clip": FisherClip().lowest_rate * norms / plain * task.passes,
        "starting": machine.start * STEP_STARTS,
        "statistics": statistics / every_statistics,
        "inverses": _largest_load(inverses, places, ranks) / every_inverse,
        "natural gradients": sum(natural[n] for n in costs if n not in kept)
        + _largest_load({n: natural[n] for n in costs if n in kept}, places, ranks),
    }
    layouts = [layer.moment_layout(fresh=False) for layer in task.layers.values()]
    sent = {name: sizes[name].inverse_bytes for name in places if places[name].owner is not None}
    traffic = {
        "gradients": float(task.parameters),
        "statistics": statistics_bytes(layouts, ranks) / every_statistics,
        "inverses": sum(sent[name] for name in sent if name not in kept) / every_inverse,
        "natural gradients": float(sum(sizes[name].gradient_bytes for name in kept)),
    }
    owners = {places[name].owner for name in sent}
    messages = {
        "gradients": _sum_seconds(traffic["gradients"], ranks, machine),
        "statistics": _sum_seconds(traffic["statistics"], ranks, machine, 1 / every_statistics),
        "inverses": _broadcast_seconds(
            traffic["inverses"], ranks, machine, len(owners) / every_inverse
        ),
        "natural gradients": _broadcast_seconds(
            traffic["natural gradients"], ranks, machine, len(owners) if kept else 0
        ),
    }
    seconds = {name: contention * value for name, value in computed.items()}
    seconds |= {f"sending {name}": contention * value for name, value in messages.items()}
    return Prediction(
        ranks,
        placement,
        seconds,
        _memory(task.layers, places, ranks),
        traffic if ranks > 1 else dict.fromkeys(traffic, 0.0),
    )


def predict_all(task: Task, machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """Return predictions for every number of ranks and every placement."""
    return [
        predict(task, machine, size, placement)
        for size in ranks
        for placement in (PLACEMENTS if size > 1 else PLACEMENTS[:1])
    ]


def _inverse_seconds(task: Task, machine: Machine, costs: Mapping[str, Costs]) -> dict[str, float]:
    """Return the time of computing every layer's inverse once."""
    return {
        name: own.inverses / _speed(task.layers[name], machine) + machine.start * INVERSE_STARTS
        for name, own in costs.items()
    }


def _natural_seconds(
    machine: Machine, costs: Mapping[str, Costs], sizes: Mapping[str, LayerSize]
) -> dict[str, float]:
    """Return the time of every layer's natural gradient."""
    return {
        name: own.natural_gradient / machine.products
        + MOVED * sizes[name].gradient_bytes / machine.memory
        + machine.start * NATURAL_STARTS
        for name, own in costs.items()
    }


def _speed(layer: LayerCurvature, machine: Machine) -> float:
    """Return the multiply-adds per second of a layer's inverses."""
    return machine.products if layer.has_variable_inverse() else machine.decompositions


def _largest_load(
    seconds: Mapping[str, float], places: Mapping[str, Placement], ranks: int
) -> float:
    """Return the time of the busiest rank; every rank does what has no owner."""
    loads = dict.fromkeys(range(ranks), 0.0)
    everywhere = 0.0
    for name, value in seconds.items():
        owner = places[name].owner
        if owner is None:
            everywhere += value
        else:
            loads[owner] += value
    return everywhere + max(loads.values())


def _memory(
    layers: Mapping[str, LayerCurvature], places: Mapping[str, Placement], ranks: int
) -> int:
    everywhere, own = 0, dict.fromkeys(range(ranks), 0)
    for name, layer in layers.items():
        running, inverse = layer_memory(layer)
        everywhere += running
        owner, kept = places[name]
        if kept and owner is not None:
            own[owner] += inverse
        else:
            everywhere += inverse
    return everywhere + max(own.values())


def _sum_seconds(sent: float, ranks: int, machine: Machine, rate: float = 1.0) -> float:
    """Return the time of sums over ranks that send this many bytes per step.

    Args:
        rate: the number of sums per step.
    """
    messages = 2 * (ranks - 1)
    return messages / ranks * sent / machine.network + rate * messages * machine.latency


def _broadcast_seconds(sent: float, ranks: int, machine: Machine, rate: float) -> float:
    if ranks == 1:
        return 0.0
    return sent / machine.network + rate * math.log2(ranks) * machine.latency
