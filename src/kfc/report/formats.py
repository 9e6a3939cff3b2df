"""Numbers, ratios and names as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfc.experiments.runs import Record

MISSING = "–"


def number(value: float | None) -> str:
    """Three significant digits, or all digits of what is before the point."""
    if value is None:
        return MISSING
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}%"


def ratio(value: float) -> str:
    """Two significant digits at least: 0.53x, 7.5x, 120x."""
    if value >= 9.95:
        return f"{value:,.0f}x"
    return f"{value:.1f}x" if value >= 0.995 else f"{value:.2g}x"


def setting(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def distinct_labels(records: Sequence[Record]) -> list[str]:
    """The runs' names; with the learning rate, and a count, where several share one."""
    names = [record.name for record in records]
    labels = [
        name if names.count(name) == 1 else f"{name}, lr {setting(record.config.lr)}"
        for name, record in zip(names, records, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]
