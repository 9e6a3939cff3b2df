"""A run is a folder.

``config.json``: everything needed to repeat it. ``metrics.jsonl``: a row for every few updates
("progress"), for every evaluation, and for the end. ``checkpoint.pt``: the last one, complete at
any moment. ``events.out.tfevents...``: the same numbers for TensorBoard.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kfc.experiments.config import ConfigError, RunConfig, config_from_dict
from kfc.experiments.events import EventLog

FORMAT = 1
CONFIG, METRICS, CHECKPOINT, LOCK = "config.json", "metrics.jsonl", "checkpoint.pt", ".lock"


class RunError(Exception):
    """A run folder that cannot be used, read or written; the message says why."""


@dataclass(frozen=True)
class Record:
    """What a run folder says.

    Attributes:
        data_digest: of the data set's content.
        environment: versions and machine.
        evaluations: losses, errors (in percent), diagnostics; for both kinds of parameters.
        progress: batch losses, fisher norms and clip factors, more often.
        end: why it ended, if it has.
    """

    path: Path
    name: str
    config: RunConfig
    data_digest: str
    environment: dict[str, Any]
    evaluations: list[dict[str, Any]]
    progress: list[dict[str, Any]]
    end: dict[str, Any] | None


def read_record(path: Path) -> Record:
    """Read a run's folder, also one whose run is still going on, or was killed.

    Raises:
        RunError: it is no run's folder, or its files are damaged.
    """
    header = _read_header(path)
    rows = list(_read_rows(path / METRICS))
    ends = [row for row in rows if row["kind"] == "end"]
    return Record(
        path,
        str(header["name"]),
        header["config"],
        str(header["data_digest"]),
        header["environment"],
        [row for row in rows if row["kind"] == "evaluation"],
        [row for row in rows if row["kind"] == "progress"],
        ends[-1] if ends else None,
    )


def _read_header(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise RunError(f"{path} is not a run: it has no {CONFIG}")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise RunError(f"{file} has format {header['format']}; this version reads {FORMAT}")
        header["config"] = config_from_dict(header["config"])
        header["environment"], header["data_digest"], header["name"]
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    return dict(header)


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Complete rows; the last may have been cut short when the run was killed."""
    try:
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["kind"], row["update"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise RunError(f"{file}, line {number} is damaged: {error}") from error
        yield row


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """The last checkpoint in a run's folder; None if there is none.

    Raises:
        RunError: it is damaged.
    """
    file = path / CHECKPOINT
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own words go on for lines about pickles.
        raise RunError(f"{file} is damaged: it is no checkpoint of a run") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RunError(f"{file} is not a checkpoint that this version can read")
    return state


class RunFolder:
    """A run's folder while the run goes on, held by one process at a time."""

    def __init__(self, path: Path, config: RunConfig, data_digest: str, name: str) -> None:
        self.path = path
        self.config = config
        self.data_digest = data_digest
        self.name = name
        self._lock = _locked(path)
        with clear_disk_errors(path):
            self._metrics = (path / METRICS).open("ab")
        self._events: EventLog | None = None

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
        """A new folder. It appears with its config complete, or not at all.

        Args:
            processes: that train together.
            job: see :func:`is_of_job`.
        """
        header = {
            "format": FORMAT,
            "name": name,
            "config": config.to_dict(),
            "data_digest": data_digest,
            "environment": {**environment(), "processes": processes},
            "job": job,
        }
        create_folder(path, CONFIG, header)
        return cls(path, config, data_digest, name)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing one, to go on with."""
        header = _read_header(path)
        return cls(path, header["config"], str(header["data_digest"]), str(header["name"]))

    def set_config(self, config: RunConfig) -> None:
        """The same run with other ends."""
        header = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        with clear_disk_errors(self.path):
            write_json(self.path / CONFIG, {**header, "config": config.to_dict()})
        self.config = config

    def close(self) -> None:
        # What could not be written was reported when it was tried.
        with suppress(OSError):
            if self._events is not None:
                self._events.close()
        with suppress(OSError):
            self._metrics.close()
        self._lock.close()

    # Metrics

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; numbers that are not finite become null."""
        with clear_disk_errors(self.path):
            self._metrics.write(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")
            self._metrics.flush()
            self._write_events(row)

    def _write_events(self, row: Mapping[str, Any]) -> None:
        # What an interrupted run wrote beyond its last checkpoint is to be forgotten.
        self._events = self._events or EventLog(self.path, first=row["update"])
        values = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, float)}
        self._events.add(row["update"], values)

    # Checkpoints

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; a failure leaves the last one as it was."""
        with clear_disk_errors(self.path):
            os.fsync(self._metrics.fileno())
            content = {"format": FORMAT, "metrics_bytes": self._metrics.tell(), **state}
            buffer = io.BytesIO()
            torch.save(content, buffer)
            write_atomically(self.path / CHECKPOINT, buffer.getbuffer())

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, with the metrics cut back to its moment; None if there is none."""
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


class ForeignFolder:
    """A run's folder on the ranks that leave it to rank 0: nothing is written, and none read."""

    def __init__(self, path: Path, config: RunConfig, data_digest: str) -> None:
        self.path = path
        self.config = config
        self.data_digest = data_digest

    def write(self, row: Mapping[str, Any]) -> None:
        pass

    def save(self, state: Mapping[str, Any]) -> None:
        pass

    def load(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_of_job(path: Path, config: RunConfig, job: str | None) -> bool:
    """Whether a folder is of this run, begun by the same job before its processes were restarted.

    Args:
        job: what the launcher calls it; ``None`` if nobody starts processes again.
    """
    if job is None:
        return False
    try:
        header = _read_header(path)
    except RunError:  # whatever it is
        return False
    return header.get("job") == job and bool(header["config"] == config)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """All of it, on the disk, or nothing: whoever looks sees the old file or the new one."""
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


def create_folder(path: Path, name: str, content: Mapping[str, Any]) -> None:
    """A new folder with a JSON file in it, which appears with the file complete or not at all."""
    if path.exists():
        raise RunError(
            f"{path} exists already and is never overwritten: choose another --out, remove it, "
            f"or go on with it by --resume {path}"
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


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    return {
        "kfc": version("kfc-torch"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _locked(path: Path) -> io.TextIOWrapper:
    """Hold the folder until the file is closed, or the process is gone.

    By a lock of the process, not of the open file: workers that prepare batches inherit the file,
    and may live a little longer.
    """
    try:
        import fcntl
    except ImportError:  # there is no such lock on Windows
        return (path / LOCK).open("w")
    with clear_disk_errors(path):
        lock = (path / LOCK).open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunError(f"{path} is in use: another process goes on with this run") from error
    return lock


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is kept"
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
