"""What an inspection means for training: approximations by layer, their cost, and a command."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from shlex import quote
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc.analysis import LayerComparison, LayerRecord, record_layer
from kfc.curvature import options
from kfc.curvature.damping import Damping
from kfc.lab.inspection.networks import InspectedNetwork
from kfc.lab.inspection.results import PLAIN, Advice, Inspection, LayerAdvice
from kfc.schedule import Periods, longest

# The approximations that training offers.
TRAINABLE = ("kfc", "ekfac", "sua", "prong", "diagonal")
DEFAULT_OVERHEAD = 0.25
# The batch of `kfc train`, and the part of it that statistics are gathered from.
BATCH, FRACTION = 512, 0.25


class Choice(NamedTuple):
    """A way to treat a layer.

    Attributes:
        seconds: the time that it adds to a step.
        value: the decrease of the loss that it promises, up to a factor that all layers share.
    """

    name: str
    seconds: float
    value: float


def advise(network: InspectedNetwork, inspection: Inspection, overhead: float) -> Advice:
    """Measure what each approximation costs in a training step, and choose within the overhead.

    With the best length in every layer, the blocks of a step v with a given vᵀ(F + δ)v contribute
    Σ gain · decrease² to the square of the decrease of the loss. There is no advice for layers
    without a measured approximation that training offers.
    """
    compared = {
        layer.name: layer.comparison
        for layer in inspection.layers
        if layer.comparison is not None
        and not layer.comparison.approximations.keys().isdisjoint(TRAINABLE)
    }
    damping = inspection.settings.damping
    costs = {name: _seconds(network, name, found, damping) for name, found in compared.items()}
    passes = _seconds_of_passes(network)
    choices = {name: _choices(found, costs[name]) for name, found in compared.items()}
    chosen = allocate(choices, overhead * passes)
    layers = [_layer_advice(found, chosen[name], choices) for name, found in compared.items()]
    single = {name for name, found in compared.items() if found.offsets == 1}
    curvature = overall(choices, overhead * passes, single)
    return Advice(
        overhead,
        passes,
        tuple(layers),
        curvature,
        _command(network.description, curvature, overhead, damping),
        _call(layers, curvature, overhead, damping),
    )


def allocate(choices: Mapping[str, Mapping[str, Choice]], allowance: float) -> dict[str, Choice]:
    """Return a choice for every layer, whose times add up to at most the allowance.

    Starts with the plain gradient, and repeats the change with the largest value for its time.
    """
    chosen = {layer: known[PLAIN] for layer, known in choices.items()}
    while True:
        left = allowance - sum(choice.seconds for choice in chosen.values())
        changes = [
            (_rate(chosen[layer], other), layer, other)
            for layer, known in choices.items()
            for other in known.values()
            if other.value > chosen[layer].value and other.seconds - chosen[layer].seconds <= left
        ]
        if not changes:
            return chosen
        _, layer, best = max(changes, key=lambda change: change[0])
        chosen[layer] = best


def _rate(old: Choice, new: Choice) -> float:
    """Return the value of a change for its time."""
    seconds = new.seconds - old.seconds
    return math.inf if seconds <= 0 else (new.value - old.value) / seconds


def _choices(found: LayerComparison, seconds: Mapping[str, float]) -> dict[str, Choice]:
    """Return the plain gradient and every approximation of a layer with its time and value."""
    choices = {PLAIN: Choice(PLAIN, 0.0, _value(found, found.plain_decrease))}
    for name in seconds:
        if name != "sua" or found.offsets > 1:  # otherwise it is KFC
            value = _value(found, found.approximations[name].decrease)
            choices[name] = Choice(name, seconds[name], value)
    return choices


def _value(found: LayerComparison, decrease: float) -> float:
    """Return gain · decrease², or 0 for a layer without derivatives."""
    return found.gain * max(decrease, 0.0) ** 2 if math.isfinite(decrease) else 0.0


def overall(
    choices: Mapping[str, Mapping[str, Choice]], allowance: float, single: Collection[str]
) -> str:
    """Return the approximation with the largest value in all layers that fits, or the cheapest.

    Those that were not measured in every layer are not compared.

    Args:
        single: the layers whose kernel has a single offset, in which SUA is KFC.
    """
    total = {}
    for name in TRAINABLE:
        own = [
            known.get("kfc" if name == "sua" and layer in single else name)
            for layer, known in choices.items()
        ]
        measured = [each for each in own if each is not None]
        if len(measured) == len(own):
            total[name] = sum(each.seconds for each in measured), sum(e.value for e in measured)
    if not total:
        return "kfc"
    fitting = [name for name in total if total[name][0] <= allowance]
    if fitting:
        return max(fitting, key=lambda name: total[name][1])
    return min(total, key=lambda name: total[name][0])


def _layer_advice(
    found: LayerComparison, chosen: Choice, choices: Mapping[str, Mapping[str, Choice]]
) -> LayerAdvice:
    known = {layer: each["kfc"] for layer, each in choices.items() if "kfc" in each}
    own, plain = known.get(found.layer), choices[found.layer][PLAIN]
    time, value = (
        sum(getattr(each, part) for each in known.values()) for part in Choice._fields[1:]
    )
    qualities = found.approximations
    decrease = found.plain_decrease if chosen.name == PLAIN else qualities[chosen.name].decrease
    ratio = qualities["kfc"].trace_ratio if "kfc" in qualities else math.nan
    return LayerAdvice(
        found.layer,
        chosen.name,
        decrease,
        found.plain_decrease,
        1 / ratio if ratio else math.nan,
        own.seconds if own else math.nan,
        own.seconds / time if own and time else math.nan,
        (own.value - plain.value) / value if own and value else math.nan,
    )


# Times


def _seconds(
    network: InspectedNetwork, name: str, found: LayerComparison, damping: float
) -> dict[str, float]:
    """Return the seconds that each trainable approximation adds to a step for a layer."""
    count = min(round(FRACTION * BATCH), len(network.images))
    record = record_layer(
        network.model, network.images[:count], name, likelihood=network.task.likelihood, samples=1
    )
    gradient = {role: torch.randn_like(p) for role, p in record.layer.trained().items()}
    scale = FRACTION * BATCH / count
    return {
        approximation: _seconds_of(record, approximation, gradient, damping, scale)
        for approximation in TRAINABLE
        if approximation in found.approximations
    }


def _seconds_of(
    record: LayerRecord, name: str, gradient: dict[str, Tensor], damping: float, scale: float
) -> float:
    """Return the time of a natural gradient, and the shares of statistics and of the inverse."""
    periods, both = Periods(), Damping.uniform(damping)
    curvature = options.APPROXIMATIONS[name]().for_layer(record.layer)
    record.gather(curvature)  # the first call of everything takes longer
    start = perf_counter()
    record.gather(curvature)
    gathered = perf_counter()
    curvature.adopt_inverse(curvature.invert(curvature.block(both).running, both), both)
    inverted = perf_counter()
    curvature.solve(gradient)
    solved = perf_counter()
    curvature.solve(gradient)
    end = perf_counter()
    statistics, inverse = scale * (gathered - start), inverted - gathered
    refreshes = statistics / longest(periods.statistics) + inverse / longest(periods.inverse)
    return end - solved + refreshes


def _seconds_of_passes(network: InspectedNetwork) -> float:
    """Return the time of a forward and a backward pass of a batch of training."""
    model, count = network.model, min(BATCH, len(network.images))
    images, labels = network.images[:count], network.labels[:count]
    parameters = [p for p in model.parameters() if p.requires_grad]
    times = []
    for _ in range(3):
        start = perf_counter()
        loss = network.task.loss(model(images), images, labels)
        torch.autograd.grad(loss, parameters, allow_unused=True)
        times.append(perf_counter() - start)
    return min(times) * BATCH / count


# How to train


def _command(
    description: Mapping[str, Any], curvature: str, overhead: float, damping: float
) -> str:
    chosen = {name: description.get(name) for name in ("data", "net", "init", "inputs")}
    chosen |= {"optimizer": "kfc", "curvature": curvature}
    chosen |= {"overhead": f"{overhead:g}", "damping": f"{damping:g}"}
    given = (f"--{name} {quote(str(value))}" for name, value in chosen.items() if value is not None)
    return " ".join(["kfc train", *given])


def _call(layers: Sequence[LayerAdvice], curvature: str, overhead: float, damping: float) -> str:
    plain = [each.layer for each in layers if each.approximation == PLAIN]
    groups = [{"prefix": name, "treatment": "plain"} for name in plain]
    arguments = [f"damping={damping:g}"]
    if curvature != "kfc":
        arguments.append(f"curvature={curvature!r}")
    if groups:
        arguments.append(f"groups={groups!r}")
    arguments.append(f"schedule=kfc.Budget({overhead:g})")
    return f"kfc.KFC(model, {', '.join(arguments)})"
