"""Settings and results of an inspection, and their form in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfc.analysis import APPROXIMATIONS, Assumption, Correlations, LayerComparison, Quality
from kfc.analysis.blocks import DEFAULT_MAX_GIB
from kfc.analysis.correlations import DEFAULT_REACH
from kfc.lab.options import ConfigError, check_options, option

FORMAT = 1
MOST_EIGENVALUES = 400
PANEL = "Inspection"


@dataclass(frozen=True)
class InspectionSettings:
    """The options of an inspection."""

    seed: int = option(
        0, "Seed of drawn targets, and of the weights of an untrained network", panel=PANEL
    )
    layers: Sequence[str] = option(
        (),
        "Name of a layer such as conv2, may be repeated; by default all layers",
        panel=PANEL,
        flag="layer",
    )
    # A single example has no spread.
    examples: int = option(256, "Number of training examples", panel=PANEL, low=2)
    samples: int = option(
        8,
        "Targets drawn for each example, for assumptions and correlations",
        panel=PANEL,
        positive=True,
    )
    exact_samples: int | None = option(
        None,
        "Targets drawn for each example, for the blocks; by default all targets, so that the "
        "blocks are exact",
        panel=PANEL,
        positive=True,
        flag="samples-exact",
    )
    damping: float = option(
        1e-3, "Damping of the natural gradients that are compared", panel=PANEL, positive=True
    )
    approximations: Sequence[str] = option(
        tuple(APPROXIMATIONS),
        f"{', '.join(APPROXIMATIONS)}; may be repeated; by default all",
        panel=PANEL,
        flag="approximation",
    )
    reach: int = option(
        DEFAULT_REACH, "Largest offset between locations, in pixels", panel=PANEL, positive=True
    )
    memory: float = option(
        DEFAULT_MAX_GIB,
        "Size limit of each of the largest arrays, in GiB",
        panel="Machine",
        positive=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.approximations:
            if name not in APPROXIMATIONS:
                raise ConfigError(
                    f"approximation must be one of {', '.join(APPROXIMATIONS)}, got {name!r}"
                )


@dataclass(frozen=True)
class LayerInspection:
    """The results for one layer.

    Attributes:
        kind: the layer's class, such as "Conv2d".
        shape: (groups, I, n) of the layer's gradient.
        examples: number of examples; fewer than requested if more do not fit into the memory, as
            ``compared_examples``.
        assumptions: the assumptions that apply, by name.
        correlations: ``None`` for layers without locations.
        compared_examples: number of examples of the comparison.
        targets: targets of the comparison: "enumerated", or how many were drawn.
        comparison: ``None`` if it was not possible.
        notes: results that were left out, and why.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    examples: int = 0
    assumptions: Mapping[str, Assumption] | None = None
    correlations: Correlations | None = None
    compared_examples: int = 0
    targets: str = ""
    comparison: LayerComparison | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        assumptions = self.assumptions or {}
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "examples": self.examples,
            "assumptions": {name: _of_assumption(each) for name, each in assumptions.items()},
            "correlations": _plain(self.correlations),
            "comparison": None if self.comparison is None else self._comparison(self.comparison),
            "notes": list(self.notes),
        }

    def _comparison(self, found: LayerComparison) -> dict[str, Any]:
        return {
            "examples": self.compared_examples,
            "targets": self.targets,
            "gradients": found.gradients,
            "trace": _plain(found.trace),
            "operator_norm": _plain(found.operator_norm),
            "spectrum": _of_spectrum(found.spectrum),
            "approximations": {
                name: _of_quality(name, quality) for name, quality in found.approximations.items()
            },
        }


@dataclass(frozen=True)
class Inspection:
    """The results for one network.

    Attributes:
        network: a run's folder, and the options that determine the network.
        training: progress and errors of a run; ``None`` for an untrained network.
    """

    label: str
    network: Mapping[str, Any]
    training: Mapping[str, Any] | None
    settings: InspectionSettings
    environment: Mapping[str, Any]
    layers: Sequence[LayerInspection]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become ``None``."""
        return {
            "format": FORMAT,
            "label": self.label,
            "network": _plain(self.network),
            "training": _plain(self.training),
            "settings": _plain(self.settings),
            "environment": _plain(self.environment),
            "layers": [layer.to_json() for layer in self.layers],
        }


def thinned_ranks(count: int, most: int = MOST_EIGENVALUES) -> list[int]:
    """Return ranks from 1 to ``count``: all, or at most ``most`` evenly on a logarithmic scale."""
    if count <= most:
        return list(range(1, count + 1))
    steps = torch.linspace(0, math.log(count), most, dtype=torch.float64)
    return sorted({round(math.exp(step)) for step in steps.tolist()})


def _of_assumption(found: Assumption) -> dict[str, Any]:
    deciding = _plain(found.deciding)
    return {"verdict": found.verdict, **deciding, "measures": _plain(found.measures)}


def _of_quality(name: str, quality: Quality) -> dict[str, Any]:
    kind, spectrum = APPROXIMATIONS[name], _of_spectrum(quality.spectrum)
    numbers = _plain(replace(quality, spectrum=None))
    return {"title": kind.title, "assumes": kind.assumes, **numbers, "spectrum": spectrum}


def _of_spectrum(spectrum: Tensor | None) -> dict[str, Any] | None:
    if spectrum is None:
        return None
    ranks = thinned_ranks(len(spectrum))
    values = spectrum[torch.tensor(ranks, dtype=torch.long) - 1]
    return {"count": len(spectrum), "ranks": ranks, "values": _plain(values)}


def _plain(value: Any) -> Any:
    """Return the value as numbers (``None`` if not finite), strings, lists and dicts."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, str, type(None))) else str(value)
