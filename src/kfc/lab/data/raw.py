"""Find the raw files of a data set, decode them, and verify the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kfc.lab.data.catalogue import Entry, Form, owner_of
from kfc.lab.data.datasets import DataError, Split, Splits, content_digest
from kfc.lab.data.files import Read, archive_reader, checksum, file_in, folder_reader


class AnotherSetError(DataError):
    """The content is that of another data set of the catalogue."""


@dataclass(frozen=True)
class Raw:
    """The files of a data set in one form: an archive, or a folder with all files."""

    form: Form
    path: Path

    @property
    def files(self) -> list[Path]:
        if self.path.is_dir():
            found = (file_in(self.path, name) for name in self.form.limits)
            return [path for path in found if path]
        return [self.path]

    @property
    def is_official(self) -> bool:
        """Whether every file has the checksum of the published one."""
        published = [(path, self.form.checksums.get(path.name)) for path in self.files]
        return all(
            expected and checksum(path, expected) == expected for path, expected in published
        )

    def reader(self) -> Read:
        if self.path.is_dir():
            return folder_reader(self.path, self.form.limits)
        return archive_reader(self.path, self.form.root, self.form.limits)


@dataclass(frozen=True, eq=False)
class Verified:
    """Verified content, its digest, and the files it came from."""

    splits: Splits
    digest: str
    raw: Raw


def find_raw(entry: Entry, folder: Path) -> Iterator[Raw]:
    """Yield every complete form of the data set in the data folder.

    Files whose names fit several forms are returned once, in the first of these forms.
    """
    found: dict[tuple[Path, frozenset[str]], Raw] = {}
    for place in (folder / entry.name, folder):
        for form in entry.forms:
            for path in _paths_of(form, place):
                found.setdefault((path, frozenset(form.limits)), Raw(form, path))
    yield from found.values()


def _paths_of(form: Form, place: Path) -> Iterator[Path]:
    if form.archive and (place / form.archive).exists():
        yield place / form.archive
    for directory in dict.fromkeys((place / form.root, place)):
        if all(file_in(directory, name) for name in form.limits):
            yield directory


def describe_missing(entry: Entry, folder: Path) -> str:
    """Return a message that names the missing files if some, but not all, are in the folder."""
    for place in (folder / entry.name, folder):
        for form in entry.forms:
            missing = [name for name in form.limits if not file_in(place, name)]
            if 0 < len(missing) < len(form.limits):
                return f"{place} lacks {', '.join(missing)}"
    return f"no files of {entry.name} in {folder} or {folder / entry.name}"


def decode_own(entry: Entry, folder: Path, raw: Raw) -> Verified | None:
    """Decode as ``decode_raw`` does; return None for another set's files in the shared folder.

    MNIST and Fashion-MNIST have the same file names, so the folder that all data sets share may
    hold the files of the other one.
    """
    try:
        return decode_raw(entry, raw)
    except AnotherSetError:
        if raw.path.is_relative_to(folder / entry.name):
            raise
        return None


def decode_raw(entry: Entry, raw: Raw) -> Verified:
    """Decode and verify the files.

    Raises:
        DataError: with the names and hashes of the files, if they are damaged or differ from the
            catalogue.
    """
    try:
        splits = raw.form.decode(raw.reader())
        return Verified(splits, verify(entry, splits), raw)
    except DataError as error:
        raise type(error)(_refusal(entry, raw, str(error))) from error
    except Exception as error:  # a crafted file may raise any exception of a library
        reason = f"it cannot be decoded ({type(error).__name__}: {error})"
        raise DataError(_refusal(entry, raw, reason)) from error


def _refusal(entry: Entry, raw: Raw, reason: str) -> str:
    lines = [f"{raw.path} is not valid as {entry.name}: {reason}"]
    for path in filter(Path.is_file, raw.files):
        line = f"  {path.name}: "
        if published := raw.form.checksums.get(path.name):
            line += f"{checksum(path, published)}, published as {published}"
        else:
            line += checksum(path)
        lines.append(line)
    return "\n".join([*lines, "Remove or replace it."])


def verify(entry: Entry, splits: Splits) -> str:
    """Return the digest of the content if it has the shapes, counts and digest of the entry."""
    check_structure(entry, "training", splits.train, entry.train)
    check_structure(entry, "test", splits.test, entry.test)
    digest = content_digest(splits)
    if entry.digest not in (None, digest):
        message = f"the content has sha256 {digest}, not {entry.digest}"
        if owner := owner_of(digest):
            raise AnotherSetError(f"{message}; this is the content of {owner}")
        raise DataError(message)
    return digest


def check_structure(entry: Entry, title: str, split: Split, count: int) -> None:
    """Raise a DataError unless shapes, number of examples and labels are those of the entry."""
    if split.images.shape[1:] != entry.shape:
        raise DataError(f"the {title} images are {split.images.shape[1:]}, not {entry.shape}")
    if len(split.images) != len(split.labels):
        raise DataError(f"{len(split.images):,} {title} images, but {len(split.labels):,} labels")
    if not (len(split) == count if entry.digest else 0 < len(split) <= count):
        raise DataError(f"{len(split):,} {title} examples instead of {count:,}")
    if split.labels.min() < 0 or split.labels.max() >= entry.classes:
        raise DataError(f"there are {title} labels outside 0 to {entry.classes - 1}")
