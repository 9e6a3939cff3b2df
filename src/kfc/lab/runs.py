"""Run folders.

``config.json`` holds everything needed to repeat a run. ``metrics.jsonl`` has a row for every few
updates ("progress"), for the first estimate of the factors, for every evaluation and for the end.
``checkpoint.pt`` is the last checkpoint, ``checkpoint-1.pt`` the one before it.
``events.out.tfevents...`` has the same numbers as the metrics for TensorBoard.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from kfc.lab.checkpoints import (
    CHECKPOINT,
    ForeignCheckpointError,
    Found,
    State,
    checkpoint_files,
    find_newest,
    write_checkpoint,
)
from kfc.lab.config import LIMITS, Length, RunConfig, config_from_dict
from kfc.lab.data import Dataset
from kfc.lab.disk import (
    RunError,
    clear_disk_errors,
    create_folder,
    locked,
    read_checked,
    write_checked,
)
from kfc.lab.environment import environment
from kfc.lab.events import Events
from kfc.lab.metrics import KINDS, Position, Row, encode, read_rows

FORMAT = 4
CONFIG, METRICS = "config.json", "metrics.jsonl"


# Reading


@dataclass(frozen=True)
class Header:
    """The contents of ``config.json``.

    Attributes:
        run: an id that no other run has.
        job: the launcher's job that began the run, if there was a launcher.
    """

    run: str
    name: str
    config: RunConfig
    data_digest: str
    environment: dict[str, Any]
    job: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **vars(self), "config": self.config.to_dict()}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything of the configuration that a resumed run keeps, as JSON represents it."""
        values = self.config.to_dict()
        kept = {name: value for name, value in values.items() if name not in LIMITS}
        found: dict[str, Any] = json.loads(json.dumps(kept))
        return found


@dataclass(frozen=True)
class Record:
    """The contents of a run folder.

    Attributes:
        evaluations: rows of losses, errors (in percent) and diagnostics.
        progress: rows of batch losses, Fisher norms and clip factors.
        end: the row that says why the run has ended, if it has.
        estimate: the row of the first estimate of the factors, if there was one; its ``seconds``
            are the time of the estimate, because nothing is trained before it.
    """

    path: Path
    name: str
    config: RunConfig
    data_digest: str
    environment: dict[str, Any]
    evaluations: list[Row]
    progress: list[Row]
    end: Row | None
    estimate: Row | None = None


def read_record(path: Path) -> Record:
    """Read a run folder; the run may be in progress, or may have been killed."""
    header = read_header(path)
    rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in read_rows(path / METRICS, header.run):
        rows[row["kind"]].append(row)
    return Record(
        path,
        header.name,
        header.config,
        header.data_digest,
        header.environment,
        rows["evaluation"],
        rows["progress"],
        rows["end"][-1] if rows["end"] else None,
        rows["estimate"][-1] if rows["estimate"] else None,
    )


def read_end(path: Path) -> Row | None:
    """Return the row that says why a run has ended; ``None`` if it has not, or a row is damaged."""
    with suppress(RunError):
        return read_record(path).end
    return None


def read_header(path: Path) -> Header:
    """Read and verify the configuration in a run folder."""
    file = path / CONFIG
    if not file.is_file():
        raise RunError(f"{path} is not a run: it has no {CONFIG}")
    content = read_checked(file)
    if (version := content.pop("format", None)) != FORMAT:
        raise RunError(
            f"{path} was recorded by another version of kfc: {CONFIG} has format {version!r}, and "
            f"this version reads {FORMAT}; repeat the run"
        )
    try:
        header = Header(**{**content, "config": config_from_dict(content["config"])})
        texts = (header.run, header.name, header.data_digest, header.job or "")
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("run, name, data_digest and job must be strings")
        header.run.encode()  # as checksums of metrics need it
        if not isinstance(header.environment, dict):
            raise TypeError("environment must be an object")
    except Exception as error:  # values of any type may have been written by hand
        raise RunError(f"{file} is damaged, or from another version: {error}") from error
    return header


def read_checkpoint(path: Path) -> Found | None:
    """Return the newest good checkpoint in a run folder, or ``None`` if there is none."""
    header = read_header(path)
    return find_newest(path, lambda state: _require_own(state, header, path))


def _require_own(state: State, header: Header, path: Path) -> None:
    """Raise ``ForeignCheckpointError`` unless the checkpoint was saved by this run."""
    if state.get("format") != FORMAT:
        raise ForeignCheckpointError(
            f"the checkpoint in {path} was saved by another version of kfc: it has format "
            f"{state.get('format')!r}, and this version reads {FORMAT}"
        )
    if state.get("run") != header.run:
        raise ForeignCheckpointError(
            f"the checkpoint in {path} is not of this run: it was saved by the run "
            f"{state.get('run')!r}, and this is {header.run!r}; put back the run's own"
        )
    theirs, ours = state.get("settings"), header.settings
    if theirs != ours:
        differing = [f"--{name}" for name in ours if (theirs or {}).get(name) != ours[name]]
        raise ForeignCheckpointError(
            f"the checkpoint in {path} was saved with other settings than those in {CONFIG}: "
            f"{', '.join(differing)}; restore {CONFIG}, or start a new run"
        )


def require_data(data: Dataset, digest: str, owner: str) -> None:
    """Raise ``RunError`` unless the data have the digest that the owner's data have."""
    if data.digest != digest:
        raise RunError(
            f"{owner} other data: {data.name} has digest {digest} there and {data.digest} here"
        )


@contextmanager
def matching_checkpoint(path: Path) -> Iterator[None]:
    """Turn errors in restoring a checkpoint into a ``RunError``."""
    try:
        yield
    except Exception as error:
        # The checkpoint is as it was written, so that the network or the code has changed.
        raise RunError(
            f"the checkpoint in {path} does not fit the network: {type(error).__name__}: {error}"
        ) from error


def is_of_job(path: Path, config: RunConfig, job: str | None) -> bool:
    """Return whether a launcher's job began this run before its processes were restarted."""
    with suppress(RunError):
        header = read_header(path)
        return job is not None and header.job == job and header.config == config
    return False


# Writing


class RunFolder:
    """The folder of a run in progress, locked by one process.

    Nothing in it changes before the first row or checkpoint is written.

    Args:
        length: other limits for the run.

    Attributes:
        note: why ``load`` has not used the newest checkpoint; empty if it has.
    """

    def __init__(self, path: Path, length: Length | None = None) -> None:
        self.path = path
        self._header = read_header(path)
        config = self._header.config
        self.config = config if length is None else config.with_length(length)
        self.data_digest = self._header.data_digest
        self.note = ""
        self._lock = locked(path)
        self._found: Found | None = None
        self._position: Position | None = None  # of the next row; None before load() or restart()
        self._begins_again = False
        self._newest_is_bad = False
        self._metrics: BinaryIO | None = None
        self._events: Events | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        config: RunConfig,
        data_digest: str,
        name: str,
        *,
        processes: int = 1,
        job: str | None = None,
    ) -> RunFolder:
        """Create a folder with a complete configuration, or none at all."""
        machine = {**environment(), "processes": processes}
        header = Header(uuid.uuid4().hex, name, config, data_digest, machine, job)
        create_folder(path, CONFIG, header.to_dict())
        folder = cls(path)
        folder.restart()
        return folder

    def close(self) -> None:
        for file in (self._events, self._metrics, self._lock):
            with suppress(OSError):  # an error was reported when the row was written
                if file is not None:
                    file.close()

    # Resumption

    def newest(self) -> State | None:
        """Return the newest good checkpoint; ``None`` if the run was ended before its first.

        Raises:
            RunError: checkpoints are missing or damaged, or those of another run.
        """
        again = f"kfc train --resume {quote(str(self.path))} --restart begins the run again"
        try:
            self._found = self._found or find_newest(self.path, self._check)
            if self._found is None:
                self._require_no_updates()
        except ForeignCheckpointError:
            raise
        except RunError as error:
            raise RunError(f"{error}; {again}") from error
        return None if self._found is None else self._found.state

    def load(self) -> State | None:
        """Return the newest good checkpoint, and let the next row follow it.

        Metrics after the checkpoint are discarded when the next row or checkpoint is written.
        """
        state = self.newest()
        if state is None or self._found is None:
            self._position = Position.at_start(self._header.run)
            return None
        self.note, self._newest_is_bad = self._found.note, self._found.file.name != CHECKPOINT
        self._position = _position_of(state)
        self._found = None
        return state

    def restart(self) -> None:
        """Let the next row be the first; it discards all metrics and checkpoints."""
        self._position = Position.at_start(self._header.run)
        self._begins_again = True

    def _check(self, state: State) -> None:
        """Raise ``RunError`` unless the checkpoint belongs to this run and to its metrics."""
        _require_own(state, self._header, self.path)
        read_rows(self.path / METRICS, self._header.run, _position_of(state))

    def _require_no_updates(self) -> None:
        """Raise ``RunError`` if the run has trained, although it has no checkpoint."""
        rows = read_rows(self.path / METRICS, self._header.run)
        if rows and (last := rows[-1]["update"]) > 0:
            raise RunError(
                f"{self.path} has no {CHECKPOINT}, although {METRICS} has rows up to update "
                f"{last}: put the file back"
            )

    # Rows and checkpoints

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of metrics; numbers that are not finite become null."""
        with clear_disk_errors(self.path):
            metrics, position = self._open()
            line, self._position = encode(row, position)
            metrics.write(line)
            metrics.flush()
            # A new file at the first row, so that TensorBoard discards the rows of an interrupted
            # run after its last checkpoint.
            self._events = self._events or Events(self.path, first=row["update"])
            self._events.write(row)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; if that fails, those before it remain."""
        with clear_disk_errors(self.path):
            metrics, position = self._open()
            os.fsync(metrics.fileno())
            content = {
                "format": FORMAT,
                "run": self._header.run,
                "settings": self._header.settings,
                "metrics_bytes": position.size,
                "metrics_check": position.check,
                **state,
            }
            kept = self.config.records.checkpoints
            write_checkpoint(self.path, content, kept, replace_newest=self._newest_is_bad)
            self._newest_is_bad = False

    def _open(self) -> tuple[BinaryIO, Position]:
        """Return the file of metrics and the place of the next row.

        The first call makes the folder that of the run which is continued.
        """
        if self._position is None:
            raise RuntimeError("call load() or restart() before the first row")
        if self._metrics is None:
            if self.config != self._header.config:
                header = {**self._header.to_dict(), "config": self.config.to_dict()}
                write_checked(self.path / CONFIG, header)
            if self._begins_again:
                for file in (self.path / METRICS, *checkpoint_files(self.path)):
                    file.unlink(missing_ok=True)
            self._metrics = (self.path / METRICS).open("ab")
            self._metrics.truncate(self._position.size)
        return self._metrics, self._position


def _position_of(state: State) -> Position:
    return Position(state["metrics_bytes"], state["metrics_check"])


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of a run on ranks other than 0, which neither read nor write it."""

    path: Path
    config: RunConfig
    data_digest: str

    def write(self, row: Mapping[str, Any]) -> None: ...
    def save(self, state: Mapping[str, Any]) -> None: ...
    def load(self) -> None: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


AnyFolder = RunFolder | RemoteFolder
