"""Tables and notes of the advice that follows from an inspection."""

from __future__ import annotations

import math

from kfc.lab.inspection.results import Advice
from kfc.lab.report.tables import MISSING, Row, number


def advice_rows(advice: Advice) -> list[Row]:
    """Return a table with a row for each layer."""
    rows: list[Row] = [
        ("layer", "use", "decrease", "plain", "trace correction", "KFC's ms", "time", "decrease by")
    ]
    for each in advice.layers:
        plain = (each.decrease, each.plain_decrease, each.trace_correction, 1e3 * each.seconds)
        cells = (number(v) if math.isfinite(v) else MISSING for v in plain)
        shares = (
            f"{share:.0%}" if math.isfinite(share) else MISSING
            for share in (each.time_share, each.decrease_share)
        )
        rows.append((each.layer, each.approximation, *cells, *shares))
    return rows


def advice_notes(advice: Advice | None) -> list[str]:
    """Return which layers waste time, and how to train; nothing without advice."""
    if advice is None:
        return []
    notes = [
        f"{each.layer} wastes time: KFC takes {each.time_share:.0%} of its time there, for "
        f"{each.decrease_share:.0%} of the square of the decrease of the loss"
        for each in advice.layers
        if each.wastes_time
    ]
    return [
        *notes,
        f"Within {advice.overhead:.0%} of {1e3 * advice.passes:.0f} ms for the passes of a batch, "
        f"{advice.curvature} is the best approximation for all layers together.",
        f"Train: {advice.command}",
        f"In Python: {advice.call}",
    ]
