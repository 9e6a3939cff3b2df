"""Run folders.

``config.json`` holds everything needed to repeat a run. ``metrics.jsonl`` has a row for every few
updates ("progress"), for the first estimate of the factors, for every evaluation and for the end.
``checkpoint.pt`` is the last checkpoint. ``events.out.tfevents...`` has the same numbers for
TensorBoard.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from kfc.lab.config import ConfigError, RunConfig, config_from_dict
from kfc.lab.data import Dataset

FORMAT = 3
KINDS = ("estimate", "evaluation", "progress", "end")
CONFIG, METRICS, CHECKPOINT, LOCK = "config.json", "metrics.jsonl", "checkpoint.pt", ".lock"


class RunError(Exception):
    """A run folder that cannot be used, read or written; the message says why."""


# Reading


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
    evaluations: list[dict[str, Any]]
    progress: list[dict[str, Any]]
    end: dict[str, Any] | None
    estimate: dict[str, Any] | None = None


def read_record(path: Path) -> Record:
    """Read a run folder; the run may be in progress, or may have been killed."""
    header = _read_header(path)
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in _read_rows(path / METRICS):
        rows[row["kind"]].append(row)
    return Record(
        path,
        header["name"],
        header["config"],
        header["data_digest"],
        header["environment"],
        rows["evaluation"],
        rows["progress"],
        rows["end"][-1] if rows["end"] else None,
        rows["estimate"][-1] if rows["estimate"] else None,
    )


def _read_header(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise RunError(f"{path} is not a run: it has no {CONFIG}")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise RunError(
                f"{path} was recorded by another version of kfc: {CONFIG} has format "
                f"{header['format']}, and this version reads {FORMAT}; repeat the run"
            )
        header["config"] = config_from_dict(header["config"])
        header["environment"], header["data_digest"], header["name"]
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise RunError(f"{file} is damaged, or from another version: {error}") from error
    return dict(header)


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield complete rows; the last may be incomplete if the run was killed."""
    try:
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["update"]
            if row["kind"] not in KINDS:
                raise ValueError(f"unknown kind {row['kind']!r}")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise RunError(f"{file}, line {number} is damaged: {error}") from error
        yield row


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the last checkpoint in a run folder, or ``None`` if there is none."""
    file = path / CHECKPOINT
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message is many lines about pickle.
        raise RunError(f"{file} is damaged: it is not the checkpoint of a run") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RunError(f"{file} is not a checkpoint that this version can read")
    return state


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
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise RunError(f"the checkpoint in {path} is not of this run: {error}") from error


def is_of_job(path: Path, config: RunConfig, job: str | None) -> bool:
    """Return whether a launcher's job began this run before its processes were restarted."""
    with suppress(RunError):
        header = _read_header(path)
        return job is not None and header.get("job") == job and bool(header["config"] == config)
    return False


# Writing


class RunFolder:
    """The folder of a run in progress, locked by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = _read_header(path)
        self.config: RunConfig = self._header["config"]
        self.data_digest: str = self._header["data_digest"]
        self._lock = locked(path)
        with clear_disk_errors(path):
            self._metrics = (path / METRICS).open("ab")
        self._events: RecordWriter | None = None

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
        header = {
            "format": FORMAT,
            "name": name,
            "config": config.to_dict(),
            "data_digest": data_digest,
            "environment": {**environment(), "processes": processes},
            "job": job,
        }
        create_folder(path, CONFIG, header)
        return cls(path)

    def set_config(self, config: RunConfig) -> None:
        """Replace the configuration; only the limits may differ."""
        with clear_disk_errors(self.path):
            write_json(self.path / CONFIG, {**self._header, "config": config.to_dict()})
        self.config = config

    def close(self) -> None:
        for file in (self._events, self._metrics, self._lock):
            with suppress(OSError):  # an error was reported when the row was written
                if file is not None:
                    file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of metrics; numbers that are not finite become null."""
        values = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, float)}
        with clear_disk_errors(self.path):
            finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
            self._metrics.write(json.dumps(finite).encode() + b"\n")
            self._metrics.flush()
            # A new file at the first row, so that TensorBoard discards the rows of an interrupted
            # run after its last checkpoint.
            self._events = self._events or _open_events(self.path, first=row["update"])
            entries = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
            _write_event(self._events, step=row["update"], summary=Summary(value=entries))
            self._events.flush()

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; if that fails, the last one remains."""
        with clear_disk_errors(self.path):
            os.fsync(self._metrics.fileno())
            content = {"format": FORMAT, "metrics_bytes": self._metrics.tell(), **state}
            buffer = io.BytesIO()
            torch.save(content, buffer)
            write_atomically(self.path / CHECKPOINT, buffer.getbuffer())

    def load(self) -> dict[str, Any] | None:
        """Return the last checkpoint, if any, and discard the metrics written after it."""
        state = read_checkpoint(self.path)
        with clear_disk_errors(self.path):
            kept = state["metrics_bytes"] if state else 0
            if self._metrics.tell() < kept:
                raise RunError(
                    f"{self.path / METRICS} is shorter than when {CHECKPOINT} was written"
                )
            self._metrics.truncate(kept)
            self._metrics.seek(kept)
        return state


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of a run on ranks other than 0, which neither read nor write it."""

    path: Path
    config: RunConfig
    data_digest: str

    def write(self, row: Mapping[str, Any]) -> None: ...
    def save(self, state: Mapping[str, Any]) -> None: ...
    def load(self) -> None: ...
    def close(self) -> None: ...


AnyFolder = RunFolder | RemoteFolder

# torch's SummaryWriter writes events from a thread, which would lose an error such as a full disk.


def _open_events(folder: Path, first: int) -> RecordWriter:
    """Open a new file of events; TensorBoard discards those from ``first`` on in older files."""
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    # A number, since several files may be written within a second.
    number = len(list(folder.glob("events.out.tfevents.*")))
    events = RecordWriter((folder / f"{name}.{number}").open("wb"))
    _write_event(events, file_version="brain.Event:2")
    _write_event(events, step=first, session_log=SessionLog(status=SessionLog.START))
    return events


def _write_event(events: RecordWriter, **content: Any) -> None:
    events.write(Event(wall_time=time.time(), **content).SerializeToString())


def environment() -> dict[str, Any]:
    """Return versions and a description of the machine."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        processor = model.split(":", 1)[1].strip()
    return {
        "kfc": version("kfc-torch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor,
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# Files


def create_folder(path: Path, name: str, content: Mapping[str, Any]) -> None:
    """Create a folder that contains a complete JSON file, or no folder at all."""
    if path.exists():
        raise RunError(
            f"{path} exists already and is never overwritten: choose another --out, remove it, "
            f"or continue it with --resume {path}"
        )
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            draft.chmod(0o755)
            write_json(draft / name, content)
            draft.rename(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False).encode())


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file to disk completely, or leave the old one unchanged."""
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def locked(path: Path) -> io.TextIOWrapper:
    """Lock the folder until the file is closed or the process ends.

    The lock belongs to the process and not to the open file, which DataLoader workers inherit and
    may keep open for longer.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return (path / LOCK).open("w")
    with clear_disk_errors(path):
        lock = (path / LOCK).open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunError(f"{path} is in use by another process") from error
    return lock


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a ``RunError`` that names the folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is kept"
        ) from error
