"""What the sections about inspected networks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kfc.experiments.findings import Inspection, LayerInspection

# (index of the layer, of the inspection, the inspection, its layer)
Found = tuple[int, int, Inspection, LayerInspection]


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def by_layer(inspections: Sequence[Inspection]) -> Iterator[list[Found]]:
    """For each layer, what each inspection found of it."""
    names = dict.fromkeys(layer.name for one in inspections for layer in one.layers)
    for index, name in enumerate(names):
        yield [
            (index, number, inspection, layer)
            for number, inspection in enumerate(inspections)
            for layer in inspection.layers
            if layer.name == name
        ]


def labelled(
    found: Sequence[Found], kind: str, inspections: Sequence[Inspection]
) -> Iterator[tuple[str, str, LayerInspection]]:
    """(id of figures, label if there are several, layer)"""
    for index, number, inspection, layer in found:
        label = inspection.label if len(inspections) > 1 else ""
        yield f"{kind}-{index}-{number}", label, layer


def heading(found: Sequence[Found]) -> str:
    kinds = dict.fromkeys(layer.kind for *_, layer in found)
    return f"{found[0][-1].name} ({', '.join(kinds)})"


def columns_of(inspections: Sequence[Inspection]) -> int:
    """How many figures stand beside each other."""
    return min(max(len(inspections), 2), 3)


def titled(label: str, words: str) -> str:
    """The words, with the label if there is one."""
    return f"{label}: {words}" if label else words[:1].upper() + words[1:]
