"""A table that says how every parameter of a model is treated."""

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn

from kfc.curvature.layer import Columns, LayerCurvature
from kfc.curvature.model import ModelCurvature
from kfc.layers import Plan, is_look_alike
from kfc.moments.folding import unfolded_shape

HEADER = ("parameter", "shape", "treatment", "factors", "memory", "why")


def describe_layers(
    model: nn.Module,
    plan: Plan,
    curvature: ModelCurvature,
    columns: Mapping[str, Columns],
    others: Mapping[str, str],
) -> str:
    """Return one row per parameter: treatment, factor shapes, memory, and the reason.

    A layer's factors and their memory (running averages and inverses) are on its first row.

    Args:
        columns: the limits of inverses that are not known yet; by default those in force.
        others: the treatment of the parameters without a block, by name.
    """
    rows: list[tuple[str, ...]] = []
    described: set[str] = set()
    total = 0
    for name, parameter in model.named_parameters():
        shape = _shape(parameter.shape)
        if not parameter.requires_grad:
            rows.append((name, shape, "frozen", "", "", "requires_grad is False"))
            continue
        if name in plan.plain:
            rows.append((name, shape, others[name], "", "", plan.plain[name]))
            continue
        owner = plan.layer_of[name][0]
        layer = curvature.layers[owner]
        if owner in described:
            rows.append((name, shape, layer.treatment, "as above", "", ""))
            continue
        described.add(owner)
        memory = sum(layer_memory(layer, columns.get(owner)))
        total += memory
        shapes = map(unfolded_shape, layer.running_shapes())
        factors = ", ".join(_shape(s[1:] if s[0] == 1 else s) for s in shapes)
        rows.append((name, shape, layer.treatment, factors, format_bytes(memory), _why(layer)))
    return f"{_table(rows)}\ntotal curvature memory: {format_bytes(total)}"


def layer_memory(curvature: LayerCurvature, columns: Columns | None = None) -> tuple[int, int]:
    """Return the bytes of a layer's running averages, and of its inverse.

    Args:
        columns: the limits of an inverse that is not known yet; by default those in force.
    """
    inverse = curvature.inverse_shapes(curvature.inverse_widths(columns)).values()
    itemsize = curvature.layer.dtype.itemsize
    running = sum(map(prod, curvature.running_shapes()))
    return running * itemsize, sum(map(prod, inverse)) * itemsize


def _why(curvature: LayerCurvature) -> str:
    layer, tied = curvature.layer, len(curvature.layer.modules)
    kind = f", treated as {type(layer).__name__}" if is_look_alike(layer.module) else ""
    parts = (
        type(layer.module).__name__ + kind,
        f"{tied} tied modules" if tied > 1 else "",
        curvature.note(),
    )
    return "; ".join(part for part in parts if part)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 MiB"."""
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
