"""What a run came to, in rows for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence

from kfc.experiments.training import Run

# "Updates to ..." counts until the training error is at or below this.
TARGET_ERROR = 1.0

LABELS = (
    "settings",
    "epochs",
    "updates",
    "seconds",
    "train loss",
    "train error",
    "test loss",
    "test error",
    f"updates to {TARGET_ERROR:g}% train error",
)


def summary_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A column per run, so that it fits a narrow window; the first row is the header."""
    columns = [(run.settings, *_numbers(run)) for run in runs]
    header = ("optimizer", *(run.name for run in runs))
    return [header, *zip(LABELS, *columns, strict=True)]


def _numbers(run: Run) -> tuple[str, ...]:
    last = run.evaluations[-1]
    reached = next((e.updates for e in run.evaluations if e.train_error <= TARGET_ERROR), None)
    return (
        str(last.epoch),
        str(last.updates),
        f"{last.seconds:.1f}",
        f"{last.train_loss:.1e}",
        f"{last.train_error:.2f}%",
        f"{last.test_loss:.2f}",
        f"{last.test_error:.2f}%",
        "not reached" if reached is None else str(reached),
    )
