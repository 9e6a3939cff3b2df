"""Raw files: where they lie, what they decode to, what their hashes are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kfc.experiments.data.containers import Read, archive_reader, folder_reader, present
from kfc.experiments.data.forms import Entry, Form
from kfc.experiments.data.sets import DataError, Decoded
from kfc.experiments.data.verification import AnotherSetError, verified_digest


@dataclass(frozen=True)
class Raw:
    """A data set's files in one form: an archive, or a folder with all of them."""

    form: Form
    path: Path

    @property
    def files(self) -> list[Path]:
        if self.path.is_dir():
            found = (present(self.path, name) for name in self.form.limits)
            return [path for path in found if path]
        return [self.path]

    def reader(self) -> Read:
        if self.path.is_dir():
            return folder_reader(self.path, self.form.limits)
        return archive_reader(self.path, self.form.root, self.form.limits)


def places(entry: Entry, folder: Path) -> tuple[Path, Path]:
    """Where a user may have put raw files."""
    return folder / entry.name, folder


def find_raw(entry: Entry, folder: Path) -> Iterator[Raw]:
    """Every complete form of the data set in the data folder.

    The files of a folder are taken once, in the first form that has their names: the published one.
    """
    found: dict[tuple[Path, frozenset[str]], Raw] = {}
    for place in places(entry, folder):
        for form in entry.forms:
            for raw in _raws_at(place, form):
                found.setdefault((raw.path, frozenset(form.limits)), raw)
    yield from found.values()


def _raws_at(place: Path, form: Form) -> Iterator[Raw]:
    if form.archive and (place / form.archive).exists():
        yield Raw(form, place / form.archive)
    for directory in dict.fromkeys((place / form.root, place)):
        if all(present(directory, name) for name in form.limits):
            yield Raw(form, directory)


def missing_files(entry: Entry, folder: Path) -> str | None:
    """What a user who put some of the files there has forgotten."""
    for place in places(entry, folder):
        for form in entry.forms:
            missing = [name for name in form.limits if not present(place, name)]
            if 0 < len(missing) < len(form.limits):
                return f"{place} lacks {', '.join(missing)}"
    return None


def decode_own(entry: Entry, folder: Path, raw: Raw) -> tuple[Decoded, str] | None:
    """As ``decode_raw``, but None for another set's files in the folder that all sets share.

    MNIST and Fashion-MNIST name their files alike: those of one must not bar the way to the other.
    """
    try:
        return decode_raw(entry, raw)
    except AnotherSetError:
        if raw.path.is_relative_to(folder / entry.name):
            raise
        return None


def decode_raw(entry: Entry, raw: Raw) -> tuple[Decoded, str]:
    """The verified content and its digest; a DataError names the files and their hashes."""
    try:
        decoded = _decoded(raw)
        return decoded, verified_digest(entry, decoded)
    except DataError as error:
        lines = [f"{raw.path} is refused as {entry.name}: {error}", *_hash_lines(raw)]
        lines.append("Remove or replace it.")
        raise type(error)("\n".join(lines)) from error


def _decoded(raw: Raw) -> Decoded:
    """What the form makes of the files; whatever a crafted one makes it raise is a DataError."""
    try:
        return raw.form.decode(raw.reader())
    except DataError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise DataError(f"it cannot be decoded ({kind}: {error})") from error


def file_hash(path: Path, algorithm: str = "md5") -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def is_official(raw: Raw) -> bool:
    """Whether every file is, byte for byte, the one that was published."""
    known = raw.form.checksums()
    return all(_matches(path, known.get(path.name)) for path in raw.files)


def _matches(path: Path, checksum: str | None) -> bool:
    if checksum is None:
        return False
    algorithm, value = checksum.split(":")
    return file_hash(path, algorithm) == value


def _hash_lines(raw: Raw) -> Iterator[str]:
    known = raw.form.checksums()
    for path in filter(Path.is_file, raw.files):
        algorithm, expected = known.get(path.name, "md5:").split(":")
        published = f", published as {expected}" if expected else ""
        yield f"  {path.name}: {algorithm} {file_hash(path, algorithm)}{published}"
