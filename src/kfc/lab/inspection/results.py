"""Settings and results of an inspection, and their form in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfc.analysis import (
    APPROXIMATIONS,
    Correlations,
    LayerComparison,
    Step,
    ladder_steps,
    rung_estimates,
)
from kfc.analysis.correlations import DEFAULT_REACH
from kfc.lab.options import ConfigError, check_options, duration, not_one_of, option

FORMAT = 2
# The losses of a step, and the numbers of an approximation that have intervals.
LOSSES = ("trace", "frobenius", "decrease")
MOST_BATCHES = 8
# The numbers of examples in a batch to choose from; the first one is measured.
SIZES = (16, 32, 64, 128)
# All targets are enumerated up to the first number; otherwise the second number is drawn.
MOST_TARGETS, DRAWN_TARGETS = 16, 8
# The treatment of a layer without curvature.
PLAIN = "plain gradient"
# A layer wastes time if KFC there takes more than the first share of the time of all layers' KFC,
# and adds less than the second share of the square of the decrease of the loss.
LARGE_SHARE, SMALL_SHARE = 0.1, 0.02
MOST_EIGENVALUES = 400
PANEL = "Inspection"
_option = partial(option, panel=PANEL, positive=True)


@dataclass(frozen=True)
class InspectionSettings:
    """The options of an inspection.

    The numbers of examples and batches are chosen from the time budget if they are ``None``.
    """

    seed: int = _option(
        0, "Seed of drawn targets, and of the weights of an untrained network", positive=False
    )
    layers: Sequence[str] = _option(
        (), "Name of a layer such as conv2, may be repeated; by default all layers", flag="layer"
    )
    budget: float = _option(
        300.0,
        'Time for each network, such as "90s", "5m" or "1h", from which the numbers of examples '
        "and batches are chosen",
        parse=duration,
    )
    # A single example has no spread.
    examples: int | None = _option(
        None, "Training examples in each batch; by default chosen", positive=False, low=2
    )
    batches: int | None = _option(
        None, "Batches of examples; intervals need three; by default chosen"
    )
    samples: int | None = _option(
        None,
        f"Targets drawn for each example; by default all targets if there are at most "
        f"{MOST_TARGETS}, and otherwise {DRAWN_TARGETS}",
    )
    damping: float = _option(1e-3, "Damping of the natural gradients that are compared")
    approximations: Sequence[str] = _option(
        tuple(APPROXIMATIONS),
        f"{', '.join(APPROXIMATIONS)}; may be repeated; by default all",
        flag="approximation",
    )
    reach: int = _option(DEFAULT_REACH, "Largest offset between locations, in pixels")
    memory: float = _option(
        0.5, "Size limit of each of the largest arrays, in GiB", panel="Machine"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.approximations:
            if name not in APPROXIMATIONS:
                raise ConfigError(not_one_of("approximation", name, APPROXIMATIONS))

    @property
    def most_batches(self) -> int:
        """The largest number of batches."""
        return self.batches or MOST_BATCHES

    @property
    def most_examples(self) -> int:
        """The largest number of examples in all batches."""
        return (self.examples or SIZES[-1]) * self.most_batches


@dataclass(frozen=True)
class LayerInspection:
    """The results for one layer.

    Attributes:
        kind: the layer's class, such as "Conv2d".
        shape: (groups, I, n) of the layer's gradient.
        examples: number of examples in each batch.
        targets: "all", or how many were drawn for each example.
        seconds: the time that the layer took.
        correlations: ``None`` for layers without locations.
        comparison: ``None`` if it was not possible.
        notes: results that were left out, and why.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    examples: int = 0
    targets: str = ""
    seconds: float = 0.0
    correlations: Correlations | None = None
    comparison: LayerComparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> dict[str, Step]:
        """What each assumption loses, by name."""
        return {} if self.comparison is None else ladder_steps(self.comparison)

    @property
    def spectra(self) -> dict[str, Tensor | None]:
        """The spectra of the exact block and of its approximations, by name."""
        if self.comparison is None:
            return {}
        qualities = self.comparison.approximations
        return {
            "exact": self.comparison.spectrum,
            **{name: quality.spectrum for name, quality in qualities.items()},
        }

    def to_json(self) -> dict[str, Any]:
        assumptions = {
            name: {
                "verdict": step.verdict,
                "measure": step.measure,
                **vars(step.deciding),
                **{loss: vars(getattr(step, loss)) for loss in LOSSES},
            }
            for name, step in self.steps.items()
        }
        comparison = None if self.comparison is None else self._comparison(self.comparison)
        return {**vars(self), "assumptions": assumptions, "comparison": comparison}

    def _comparison(self, found: LayerComparison) -> dict[str, Any]:
        spectra = {}
        for name, spectrum in self.spectra.items():
            if spectrum is not None:
                ranks, values = thinned_spectrum(spectrum)
                spectra[name] = {"count": len(spectrum), "ranks": ranks, "values": values}
        approximations = {
            name: {
                "title": APPROXIMATIONS[name].title,
                "assumes": APPROXIMATIONS[name].assumes,
                **vars(quality),
                "intervals": dict(zip(LOSSES, map(vars, rung_estimates(quality)), strict=True)),
                "spectrum": spectra.get(name),
            }
            for name, quality in found.approximations.items()
        }
        return {
            **{k: v for k, v in vars(found).items() if k not in ("layer", "shape", "left_out")},
            "spectrum": spectra.get("exact"),
            "approximations": approximations,
        }


@dataclass(frozen=True)
class LayerAdvice:
    """The advice for one layer.

    Attributes:
        approximation: the one to use, or ``PLAIN``.
        decrease, plain_decrease: that of the approximation, and of the plain gradient.
        trace_correction: tr F / tr F̂ of KFC, by which its curvature would have to be multiplied.
        seconds: the time that KFC adds to a step for this layer.
        time_share: its part of the time of KFC in all layers.
        decrease_share: what KFC in this layer adds to the sum of gain · decrease² with its plain
            gradient, as a part of the sum with KFC in all layers.
    """

    layer: str
    approximation: str
    decrease: float
    plain_decrease: float
    trace_correction: float
    seconds: float
    time_share: float
    decrease_share: float

    @property
    def wastes_time(self) -> bool:
        """Whether KFC takes much of the time for little of the decrease."""
        return self.time_share > LARGE_SHARE and self.decrease_share < SMALL_SHARE


@dataclass(frozen=True)
class Advice:
    """How to train a network.

    Attributes:
        overhead: the allowed time of curvature, relative to that of the network's own passes.
        passes: the seconds of a forward and a backward pass of a batch.
        layers: the advice for every inspected layer.
        curvature: the best approximation for all layers together, which `kfc train` takes.
        command: a `kfc train` command.
        call: the same in Python, with the plain gradient where the advice says so.
    """

    overhead: float
    passes: float
    layers: Sequence[LayerAdvice]
    curvature: str
    command: str
    call: str


@dataclass(frozen=True)
class Inspection:
    """The results for one network, which an ``InspectedNetwork`` describes."""

    label: str
    network: Mapping[str, Any]
    training: Mapping[str, Any] | None
    settings: InspectionSettings
    environment: Mapping[str, Any]
    layers: Sequence[LayerInspection]
    advice: Advice | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become ``None``."""
        layers = [layer.to_json() for layer in self.layers]
        content: dict[str, Any] = plain_values({"format": FORMAT, **vars(self), "layers": layers})
        return content


def thinned_ranks(count: int, most: int = MOST_EIGENVALUES) -> list[int]:
    """Return ranks from 1 to ``count``: all, or at most ``most`` evenly on a logarithmic scale."""
    if count <= most:
        return list(range(1, count + 1))
    steps = torch.linspace(0, math.log(count), most, dtype=torch.float64)
    return sorted({round(math.exp(step)) for step in steps.tolist()})


def thinned_spectrum(spectrum: Tensor) -> tuple[list[int], list[float]]:
    """Return ranks from 1, thinned on a logarithmic scale, and their eigenvalues."""
    ranks = thinned_ranks(len(spectrum))
    return ranks, spectrum[torch.tensor(ranks, dtype=torch.long) - 1].tolist()


def plain_values(value: Any) -> Any:
    """Return numbers, strings, lists and dicts for JSON.

    Floats have six digits, which halves a page; those that are not finite become ``None``.
    """
    if isinstance(value, Tensor):
        return plain_values(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if is_dataclass(value):
        return plain_values(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_values(item) for item in value]
    return value if isinstance(value, (int, str, type(None))) else str(value)
