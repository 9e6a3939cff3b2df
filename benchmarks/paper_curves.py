"""The recorded curves of the paper's runs: what is kept of them, and how it is written and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfc.lab.runs import Record, read_record

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "figures"
NOT_CHOSEN = "not chosen"

# What is kept of a run: its settings, and of every evaluation the averaged parameters' errors.
SETTINGS = ("optimizer", "lr", "batch_size", "weight_decay", "net", "seed")
COUNTS = ("update", "epoch", "seconds", "processor_seconds")
MEASURES = ("train_loss", "train_error", "test_loss", "test_error")
TRAIN, TEST = "averaged_train_error", "averaged_test_error"
Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A run: its name and settings, and its evaluations, in order.

    Attributes:
        end: why it ended; ``None`` if it can be continued.
    """

    name: str
    settings: Row
    end: str | None
    rows: Sequence[Row]

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def first_reaching(self, measure: str, value: float) -> Row | None:
        """Return the first evaluation that is at most this value."""
        rows = (row for row in self.rows if row[measure] is not None)
        return next((row for row in rows if row[measure] <= value), None)


def curve_of(record: Record) -> list[Row]:
    """Return the rows that are kept of a run, the settings first; numbers have four digits."""
    options = record.config.to_dict()
    first: Row = {"name": record.name, **{name: options[name] for name in SETTINGS}}
    first["end"] = None if record.end is None else record.end["reason"]
    keys = [*COUNTS, *(f"{kind}{measure}" for kind in ("", "averaged_") for measure in MEASURES)]
    return [first, *({key: _short(row[key]) for key in keys} for row in record.evaluations)]


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def collect(runs: Path) -> None:
    """Write the curves of every comparison in a folder, in place of earlier ones of its name.

    Runs that have not been evaluated after an update are left out.
    """
    for folder in sorted(path.parent for path in runs.glob("*/comparison.json")):
        records = [read_record(path.parent) for path in sorted(folder.glob("*/config.json"))]
        begun = [record for record in records if len(record.evaluations) > 1]
        rows = [row for record in begun for row in curve_of(record)]
        if rows:
            target = RESULTS / f"{folder.name}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_curves(comparison: str) -> list[Curve]:
    """Return the recorded curves of a comparison; none if it was not run."""
    file = RESULTS / f"{comparison}.jsonl"
    curves: list[Curve] = []
    rows: list[Row] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        row = json.loads(line)
        if "name" in row:
            rows = []
            settings = {key: row[key] for key in SETTINGS}
            curves.append(Curve(row["name"], settings, row["end"], rows))
        else:
            rows.append(row)
    return curves


def chosen(comparison: str) -> dict[str, Curve]:
    """Return the runs by name, without learning rates that were tried and dropped."""
    return {c.name: c for c in read_curves(comparison) if c.end != NOT_CHOSEN}


def seeds_of(comparison: str) -> list[str]:
    """Return a comparison and its repetitions with other seeds, ``<comparison>-seed<n>``."""
    return [comparison, *sorted(path.stem for path in RESULTS.glob(f"{comparison}-seed*.jsonl"))]
