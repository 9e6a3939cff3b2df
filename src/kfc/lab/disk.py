"""Files that are complete at every moment, checked when they are read, and locked while in use."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = ".lock"
DIGEST = "sha256"  # the key of a checked file's own digest


class RunError(Exception):
    """A run folder that cannot be used, read or written; the message says why."""


def read_whole(path: Path) -> bytes:
    """Return the content of a file; raise ``RunError`` if it cannot be read."""
    require_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def require_regular(path: Path) -> None:
    """Raise ``RunError`` for a folder, a pipe or a device, which could block for ever."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a regular file")


# JSON


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False).encode())


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with the SHA-256 of its content."""
    write_json(path, {**content, DIGEST: _digest(content)})


def read_checked(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of ``write_checked``, without its digest.

    Raises:
        RunError: the file cannot be read, or contains something else.
    """
    try:
        content = json.loads(read_whole(path).decode())
        if not isinstance(content, dict):
            raise ValueError("it contains no JSON object")
        recorded = content.pop(DIGEST, None)
        is_whole = recorded == _digest(content)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not is_whole:
        raise RunError(
            f"{path} is damaged, was changed by hand, or is from another version of kfc: its "
            "content does not have the SHA-256 that it records"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# Files and folders


def create_folder(path: Path, name: str, content: Mapping[str, Any]) -> None:
    """Create a folder that contains a complete checked JSON file, or no folder at all."""
    if os.path.lexists(path):
        raise RunError(
            f"{path} exists already and is never overwritten: choose another --out, remove it, "
            f"or continue it with --resume {path}"
        )
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            draft.chmod(0o755)
            write_checked(draft / name, content)
            draft.rename(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def write_atomically(
    path: Path, content: bytes | memoryview, before: Callable[[], None] = lambda: None
) -> None:
    """Write a file to disk completely, or leave the old one unchanged.

    Args:
        before: called when the content is on disk, before the file is replaced.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.unlink(missing_ok=True)  # of a process that was killed, or a link to something else
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        before()
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
        return (path / LOCK).open("a")
    require_regular(path / LOCK)
    with clear_disk_errors(path):
        lock = (path / LOCK).open("a")
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
        if isinstance(error, FileNotFoundError) and not path.exists():
            raise RunError(
                f"{path} cannot be written: there is no such folder, or it was removed"
            ) from error
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}. What was saved before is kept"
        ) from error
