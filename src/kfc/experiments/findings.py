"""What an inspection finds: how good the approximation is, layer by layer, and where it fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kfc.analysis import APPROXIMATIONS, Assumption, Correlations, LayerComparison, Quality
from kfc.analysis.blocks import DEFAULT_MAX_GIB
from kfc.analysis.correlations import DEFAULT_REACH
from kfc.checks import require_choice, require_number, require_whole
from kfc.experiments.config import ConfigError

FORMAT = 1
MOST_EIGENVALUES = 400


@dataclass(frozen=True)
class InspectionSettings:
    """
    Attributes:
        examples: so many, the first of the training set.
        samples: targets drawn for each of them, for assumptions and correlations.
        exact_samples: likewise for the blocks; ``None`` enumerates targets, if they are not too
            many, so that blocks are exact.
        damping: δ of the natural gradients that are compared.
        layers: their names; none: all.
        reach: how far apart locations are looked at.
        memory: in GiB, for each of the largest arrays.
        seed: of drawn targets, of resamples and of probes.
    """

    examples: int = 256
    samples: int = 8
    exact_samples: int | None = None
    damping: float = 1e-3
    layers: Sequence[str] = ()
    approximations: Sequence[str] = tuple(APPROXIMATIONS)
    reach: int = DEFAULT_REACH
    memory: float = DEFAULT_MAX_GIB
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            # A single example has no spread.
            require_whole("examples", self.examples, low=2)
            require_whole("samples", self.samples)
            if self.exact_samples is not None:
                require_whole("samples_exact", self.exact_samples)
            require_whole("reach", self.reach)
            require_whole("seed", self.seed, low=0)
            for name in ("damping", "memory"):
                require_number(name, getattr(self, name), positive=True)
            for name in self.approximations:
                require_choice("approximation", name, tuple(APPROXIMATIONS))
        except ValueError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True)
class LayerInspection:
    """
    Attributes:
        kind: its class, such as "Conv2d".
        shape: (groups, I, n) of its gradient.
        examples: fewer than wanted where more would not fit into the memory; as are
            ``compared_examples``.
        assumptions: by name; those that apply.
        correlations: ``None`` for layers without locations.
        comparison: ``None`` if it was not possible.
        targets: of the comparison: "enumerated", or how many were drawn.
        notes: what was left out, and why.
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
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "examples": self.examples,
            "assumptions": {
                name: _of_assumption(found) for name, found in (self.assumptions or {}).items()
            },
            "correlations": None if self.correlations is None else _plain(vars(self.correlations)),
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
    """One network.

    Attributes:
        subject: what it is: a run, or a fresh network.
        training: of a run, how far it is and its errors.
    """

    label: str
    subject: Mapping[str, Any]
    training: Mapping[str, Any] | None
    settings: InspectionSettings
    environment: Mapping[str, Any]
    layers: Sequence[LayerInspection]

    def to_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts of them; what is no number is ``None``."""
        return {
            "format": FORMAT,
            "label": self.label,
            "subject": _plain(self.subject),
            "training": _plain(self.training),
            "settings": _plain(asdict(self.settings)),
            "environment": _plain(self.environment),
            "layers": [layer.to_json() for layer in self.layers],
        }


def thinned_ranks(count: int, most: int = MOST_EIGENVALUES) -> list[int]:
    """From 1 to the count, all or evenly on a logarithmic scale, with both ends."""
    if count <= most:
        return list(range(1, count + 1))
    steps = torch.linspace(0, math.log(count), most, dtype=torch.float64)
    return sorted({round(math.exp(step)) for step in steps.tolist()})


def _of_assumption(found: Assumption) -> dict[str, Any]:
    measures = {name: _plain(asdict(measure)) for name, measure in found.measures.items()}
    return {"verdict": found.verdict, **_plain(asdict(found.deciding)), "measures": measures}


def _of_quality(name: str, quality: Quality) -> dict[str, Any]:
    numbers = {key: value for key, value in vars(quality).items() if key != "spectrum"}
    kind = APPROXIMATIONS[name]
    return {
        "title": kind.title,
        "assumes": kind.assumes,
        **_plain(numbers),
        "spectrum": _of_spectrum(quality.spectrum),
    }


def _of_spectrum(spectrum: Tensor | None) -> dict[str, Any] | None:
    if spectrum is None:
        return None
    ranks = thinned_ranks(len(spectrum))
    values = spectrum[torch.tensor(ranks, dtype=torch.long) - 1]
    return {"count": len(spectrum), "ranks": ranks, "values": _plain(values)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, str, type(None))) else str(value)
