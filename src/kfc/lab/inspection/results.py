"""Settings and results of an inspection, and their form in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfc.analysis import APPROXIMATIONS, Assumption, Correlations, LayerComparison
from kfc.analysis.blocks import DEFAULT_MAX_GIB
from kfc.analysis.correlations import DEFAULT_REACH
from kfc.lab.options import ConfigError, check_options, not_one_of, option

FORMAT = 1
MOST_EIGENVALUES = 400
PANEL = "Inspection"
_option = partial(option, panel=PANEL, positive=True)


@dataclass(frozen=True)
class InspectionSettings:
    """The options of an inspection."""

    seed: int = _option(
        0, "Seed of drawn targets, and of the weights of an untrained network", positive=False
    )
    layers: Sequence[str] = _option(
        (), "Name of a layer such as conv2, may be repeated; by default all layers", flag="layer"
    )
    # A single example has no spread.
    examples: int = _option(256, "Number of training examples", positive=False, low=2)
    samples: int = _option(8, "Targets drawn for each example, for assumptions and correlations")
    exact_samples: int | None = _option(
        None,
        "Targets drawn for each example, for the blocks; by default all targets, so that the "
        "blocks are exact",
        flag="samples-exact",
    )
    damping: float = _option(1e-3, "Damping of the natural gradients that are compared")
    approximations: Sequence[str] = _option(
        tuple(APPROXIMATIONS),
        f"{', '.join(APPROXIMATIONS)}; may be repeated; by default all",
        flag="approximation",
    )
    reach: int = _option(DEFAULT_REACH, "Largest offset between locations, in pixels")
    memory: float = _option(
        DEFAULT_MAX_GIB, "Size limit of each of the largest arrays, in GiB", panel="Machine"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.approximations:
            if name not in APPROXIMATIONS:
                raise ConfigError(not_one_of("approximation", name, APPROXIMATIONS))


@dataclass(frozen=True)
class LayerInspection:
    """The results for one layer.

    Attributes:
        kind: the layer's class, such as "Conv2d".
        shape: (groups, I, n) of the layer's gradient.
        examples, compared_examples: number of examples of the assumptions and of the comparison;
            fewer than requested if more do not fit into the memory.
        correlations: ``None`` for layers without locations.
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
            name: {"verdict": each.verdict, **vars(each.deciding), "measures": each.measures}
            for name, each in (self.assumptions or {}).items()
        }
        comparison = None if self.comparison is None else self._comparison(self.comparison)
        content = {**vars(self), "assumptions": assumptions, "comparison": comparison}
        del content["compared_examples"], content["targets"]  # they are in the comparison
        return content

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
                "spectrum": spectra.get(name),
            }
            for name, quality in found.approximations.items()
        }
        return {
            "examples": self.compared_examples,
            "targets": self.targets,
            "gradients": found.gradients,
            "trace": found.trace,
            "operator_norm": found.operator_norm,
            "spectrum": spectra.get("exact"),
            "approximations": approximations,
        }


@dataclass(frozen=True)
class Inspection:
    """The results for one network, which an ``InspectedNetwork`` describes."""

    label: str
    network: Mapping[str, Any]
    training: Mapping[str, Any] | None
    settings: InspectionSettings
    environment: Mapping[str, Any]
    layers: Sequence[LayerInspection]

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
