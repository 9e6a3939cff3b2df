"""How every parameter of a model is treated, as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from kfc.layers import Plan

HEADER = ("parameter", "shape", "treatment", "factors", "memory", "why")


def describe_layers(model: nn.Module, plan: Plan, inverse_kind: str) -> str:
    """One row per parameter: its treatment, its layer's factor shapes and memory, and the reason.

    A layer's factors and their memory (running averages and inverses) stand on its first row.
    """
    rows: list[tuple[str, ...]] = []
    counted: set[str] = set()
    total = 0
    for name, parameter in model.named_parameters():
        shape = _shape(parameter.shape)
        if not parameter.requires_grad:
            rows.append((name, shape, "frozen", "", "", "requires_grad is False"))
        elif name in plan.plain:
            rows.append((name, shape, "plain gradient", "", "", plan.plain[name]))
        else:
            layer, _ = plan.layer_of[name]
            handler = plan.handlers[layer]
            if layer in counted:
                rows.append((name, shape, handler.treatment, "as above", "", ""))
                continue
            counted.add(layer)
            shapes = handler.shapes()
            kept = [*shapes, *handler.inverse_shapes(inverse_kind).values()]
            memory = sum(map(prod, kept)) * handler.dtype.itemsize
            total += memory
            factors = ", ".join(_shape(s[1:] if s[0] == 1 else s) for s in shapes)
            kind = type(handler.module).__name__
            ties = len(handler.modules)
            why = "; ".join(
                part
                for part in (kind, f"{ties} tied modules" if ties > 1 else "", handler.note())
                if part
            )
            rows.append((name, shape, handler.treatment, factors, _bytes(memory), why))
    return f"{_table(rows)}\ncurvature memory in all: {_bytes(total)}"


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    lines = [HEADER, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
