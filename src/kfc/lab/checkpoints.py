"""Checkpoint files: verified when they are read, and kept in case the newest one is damaged.

``checkpoint.pt`` is the newest, ``checkpoint-1.pt`` the one before it, and so on. Each is a file of
``torch.save`` that ends with the SHA-256 of everything before it, as the comment of the archive, so
that ``torch.load`` reads it as well.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kfc.lab.disk import RunError, read_whole, write_atomically

CHECKPOINT = "checkpoint.pt"
_MARK = b"sha256:"
_DIGEST_LENGTH = 2 * hashlib.sha256().digest_size
State = dict[str, Any]


class ForeignCheckpointError(RunError):
    """A checkpoint of another run, which is refused even if there are others."""


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint of a folder.

    Attributes:
        note: why newer ones were not used; empty if it is the newest.
    """

    state: State
    file: Path
    note: str


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    numbers = {
        file: int(found[1] or 0)
        for file in folder.glob("checkpoint*.pt")
        if (found := re.fullmatch(r"checkpoint(?:-([1-9]\d{0,3}))?\.pt", file.name))
    }
    return sorted(numbers, key=lambda file: numbers[file])


def find_newest(folder: Path, check: Callable[[State], None]) -> Found | None:
    """Return the newest checkpoint that is undamaged and passes a check; ``None`` if there is none.

    Args:
        check: raises ``RunError`` if a checkpoint cannot be used.

    Raises:
        RunError: there are checkpoints, but none is good; or one is of another run.
    """
    problems: list[str] = []
    for file in checkpoint_files(folder):
        try:
            state = read_sealed(file)
            if not isinstance(state.get("update"), int):
                raise RunError(f"{file} is not the checkpoint of a run")
            check(state)
        except ForeignCheckpointError:
            raise
        except RunError as error:
            problems = list(dict.fromkeys([*problems, str(error)]))
            continue
        update = state["update"]
        note = f"{'; '.join(problems)}. {file.name}, of update {update}, is used instead"
        return Found(state, file, note if problems else "")
    if problems:
        raise RunError("; ".join(problems))
    return None


def read_sealed(file: Path) -> State:
    """Return the content of a file that ``sealed`` made, after comparing it with its SHA-256."""
    content = read_whole(file)
    body, digest = content[:-_DIGEST_LENGTH], content[-_DIGEST_LENGTH:]
    if not body.endswith(_MARK):
        raise RunError(f"{file} is damaged: it does not end with the SHA-256 of its content")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise RunError(f"{file} is damaged: its content does not have the SHA-256 that it records")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message is many lines about pickle.
        raise RunError(f"{file} is damaged: it is not the checkpoint of a run") from error
    if not isinstance(state, dict):
        raise RunError(f"{file} is damaged: it contains no state")
    return state


def sealed(state: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a file with this state, which ends with the SHA-256 of its content."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # An archive ends with the length of its comment, which is 0, in two bytes.
    buffer.seek(-2, io.SEEK_END)
    buffer.write((len(_MARK) + _DIGEST_LENGTH).to_bytes(2, "little") + _MARK)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(digest.encode())
    return buffer.getbuffer()


def write_checkpoint(
    folder: Path, state: Mapping[str, Any], kept: int, *, replace_newest: bool
) -> None:
    """Write the newest checkpoint; if that fails, those before it remain.

    Args:
        kept: the number of checkpoints to keep, with the new one.
        replace_newest: whether the newest so far is not worth keeping.
    """

    def rotate() -> None:
        if not replace_newest:
            _rotate(folder, kept)

    write_atomically(folder / CHECKPOINT, sealed(state), before=rotate)


def _rotate(folder: Path, kept: int) -> None:
    """Rename every checkpoint to that of the one before it; the newest keeps its name as well."""
    files = [folder / CHECKPOINT, *(folder / f"checkpoint-{n}.pt" for n in range(1, kept))]
    for newer, older in reversed(list(pairwise(files))):
        if newer.exists():
            (_add_name if newer.name == CHECKPOINT else Path.replace)(newer, older)


def _add_name(file: Path, name: Path) -> None:
    """Give a file a second name, which may be that of another file so far.

    It keeps its own at every moment, unless the file system has no hard links.
    """
    draft = name.with_name(f".{name.name}.part")
    draft.unlink(missing_ok=True)
    try:
        os.link(file, draft)
    except OSError:
        file.replace(name)
        return
    try:
        draft.replace(name)
    finally:
        draft.unlink(missing_ok=True)  # it remains if both are names of one file already
