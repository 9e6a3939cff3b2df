"""Rows of ``metrics.jsonl``, each with a checksum that continues that of the row before it.

The checksum of a row is the CRC-32 of the run's id and of all rows up to this one. A row that was
changed, lost, added or taken from another run is thus noticed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from kfc._helpers import require_number, require_whole, shown
from kfc.lab.disk import RunError, read_whole

NUMBER = (int, float, NoneType)  # numbers that are not finite are null
MEASURES = tuple(
    f"{parameters}{split}_{measure}"
    for parameters in ("", "averaged_")
    for split in ("train", "test")
    for measure in ("loss", "error")
)
# What the rows of each kind have besides "update", "epoch" and "seconds", and its types.
_CONTENT: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "estimate": {"examples": (int,)},
    "evaluation": {
        **dict.fromkeys(MEASURES, NUMBER),
        "step_seconds": (dict,),
        "diagnostics": (dict,),
    },
    "progress": {"loss": NUMBER, "images_per_second": NUMBER},
    "end": {"reason": (str,), "message": (str,)},
}
KINDS = tuple(_CONTENT)
Row = dict[str, Any]
_TAIL = re.compile(rb', "check": "[0-9a-f]{8}"\}')


@dataclass(frozen=True)
class Position:
    """A place between two rows: the bytes before it, and their checksum."""

    size: int
    check: int

    @classmethod
    def at_start(cls, run: str) -> Position:
        """Return the place before the first row of the run with this id."""
        return cls(0, zlib.crc32(run.encode()))


def encode(row: Mapping[str, Any], after: Position) -> tuple[bytes, Position]:
    """Return the line of a row, and the place after it; numbers that are not finite become null."""
    finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
    text = json.dumps(finite).encode()
    check = zlib.crc32(text, after.check)
    line = text[:-1] + _tail(check) + b"\n"
    return line, Position(after.size + len(line), check)


def _tail(check: int) -> bytes:
    """Return the end of a line: its checksum, as the last entry of the object."""
    return f', "check": "{check:08x}"}}'.encode()


def read_rows(file: Path, run: str, end: Position | None = None) -> list[Row]:
    """Return the rows up to a place, by default all.

    Without ``end``, the last line may be incomplete, as a run that was killed leaves it.

    Raises:
        RunError: the file cannot be read, or a row is damaged or not of this run.
    """
    content = read_whole(file) if file.exists() or file.is_symlink() else b""
    if end is not None and len(content) < end.size:
        raise RunError(f"{file} is shorter than when the checkpoint was saved")
    rows, position = [], Position.at_start(run)
    for number, line in enumerate(_lines(content, end), start=1):
        try:
            row, position = _decode(line, position)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{file}, line {number} is damaged: {error}") from error
        rows.append(row)
    if end is not None and position != end:
        raise RunError(f"{file} does not have the rows that it had when the checkpoint was saved")
    return rows


def _lines(content: bytes, end: Position | None) -> Iterator[bytes]:
    """Yield the lines without their ends; not an incomplete one at the end of the file."""
    *lines, rest = content[: None if end is None else end.size].split(b"\n")
    yield from lines
    # A line whose end was changed is complete; it has something after its checksum.
    if rest and (end is not None or any(found.end() < len(rest) for found in _TAIL.finditer(rest))):
        yield rest


def _decode(line: bytes, after: Position) -> tuple[Row, Position]:
    text = line[: -len(_tail(0))] + b"}"
    check = zlib.crc32(text, after.check)
    if line != text[:-1] + _tail(check):
        raise ValueError("its checksum is wrong: it was changed, or is not the run's next row")
    row = json.loads(line)
    _require_content(row)
    del row["check"]
    return row, Position(after.size + len(line) + 1, check)


def _require_content(row: Row) -> None:
    """Raise an error unless a row has what every row of its kind has; all else are numbers."""
    if row["kind"] not in KINDS:
        raise ValueError(f"unknown kind {row['kind']!r}")
    require_whole("update", row["update"], low=0)
    for name in ("epoch", "seconds"):
        require_number(name, row[name])
    if missing := _CONTENT[row["kind"]].keys() - row.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    for name, value in row.items():
        kind = _CONTENT[row["kind"]].get(name, NUMBER)
        if name not in ("kind", "check") and not isinstance(value, kind):
            raise ValueError(f"{name} has a value of another type: {shown(value)}")
