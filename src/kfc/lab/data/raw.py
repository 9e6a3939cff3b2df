"""Find the raw files of a data set, decode them, and verify the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kfc.lab.data.catalogue import CATALOGUE, Entry, Form
from kfc.lab.data.datasets import DataError, Dataset, Splits, content_digest
from kfc.lab.data.files import Files, checksum, file_in, read_archive, read_folder


class AnotherSetError(DataError):
    """The content is that of another data set of the catalogue."""


@dataclass(frozen=True)
class Raw:
    """The files of a data set in one form: an archive, or a folder with all files."""

    form: Form
    path: Path

    @property
    def files(self) -> list[Path]:
        """The archive, or the files in the folder."""
        if self.path.is_dir():
            found = (file_in(self.path, name) for name in self.form.files)
            return [path for path in found if path]
        return [self.path]

    def checksums(self) -> list[tuple[str, str, str | None]]:
        """Return the name, the checksum and the published checksum of each file."""
        pairs = [(path, self.form.checksums.get(path.name)) for path in self.files]
        return [
            (path.name, checksum(path, published or "md5:"), published)
            for path, published in pairs
            if path.is_file()
        ]

    def read(self) -> Files:
        """Return the content of the files."""
        if self.path.is_dir():
            return read_folder(self.path, self.form.files)
        return read_archive(self.path, self.form.root or "", self.form.files)


def find_raw(entry: Entry, folder: Path) -> Iterator[Raw]:
    """Yield every complete form of the data set in the data folder.

    Files whose names fit several forms are returned once, in the first of these forms.
    """
    found: dict[tuple[Path, frozenset[str]], Raw] = {}
    for place in (folder / entry.name, folder):
        for form in entry.forms:
            directories = dict.fromkeys((place / (form.root or ""), place))
            paths = [d for d in directories if all(file_in(d, name) for name in form.files)]
            if form.archive and (place / form.archive).exists():
                paths.insert(0, place / form.archive)
            for path in paths:
                found.setdefault((path, frozenset(form.files)), Raw(form, path))
    yield from found.values()


def describe_missing(entry: Entry, folder: Path) -> str:
    """Return a message that names the missing files if some, but not all, are in the folder."""
    for place in (folder / entry.name, folder):
        for form in (form for form in entry.forms if form.address):
            missing = [name for name in form.files if not file_in(place, name)]
            if 0 < len(missing) < len(form.files):
                return f"{place} lacks {', '.join(missing)}"
    return f"no files of {entry.name} in {folder} or {folder / entry.name}"


def decode_own(entry: Entry, folder: Path, raw: Raw) -> Dataset | None:
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


def decode_raw(entry: Entry, raw: Raw) -> Dataset:
    """Decode and verify the files.

    Raises:
        DataError: with the names and hashes of the files, if they are damaged or differ from the
            catalogue.
    """
    try:
        splits = raw.form.decode(raw.read())
        is_official = all(found == published for _, found, published in raw.checksums())
        return verify(entry, splits, is_official)
    except DataError as error:
        raise type(error)(_refusal(entry, raw, str(error))) from error
    except Exception as error:  # a crafted file may raise any exception of a library
        reason = f"it cannot be decoded ({type(error).__name__}: {error})"
        raise DataError(_refusal(entry, raw, reason)) from error


def _refusal(entry: Entry, raw: Raw, reason: str) -> str:
    lines = [f"{raw.path} is not valid as {entry.name}: {reason}"]
    for name, found, published in raw.checksums():
        lines.append(f"  {name}: {found}" + (f", published as {published}" if published else ""))
    return "\n".join([*lines, "Remove or replace it."])


def verify(entry: Entry, splits: Splits, is_official: bool) -> Dataset:
    """Return the data set if the content has the shapes, counts and digest of the entry."""
    check_structure(entry, splits)
    digest = content_digest(splits)
    if entry.digest not in (None, digest):
        message = f"the content has sha256 {digest}, not {entry.digest}"
        for other in CATALOGUE.values():
            if other.digest == digest:
                raise AnotherSetError(f"{message}; this is the content of {other.name}")
        raise DataError(message)
    return Dataset(splits.train, splits.test, entry.name, entry.classes, digest, is_official)


def check_structure(entry: Entry, splits: Splits) -> None:
    """Raise a DataError unless shapes, number of examples and labels are those of the entry."""
    for title, split, count in (
        ("training", splits.train, entry.train + entry.extra),
        ("test", splits.test, entry.test),
    ):
        images, labels = split.images, split.labels
        if images.shape[1:] != entry.shape:
            raise DataError(f"the {title} images are {images.shape[1:]}, not {entry.shape}")
        if len(images) != len(labels):
            raise DataError(f"{len(images):,} {title} images, but {len(labels):,} labels")
        if not (len(labels) == count if entry.digest else 0 < len(labels) <= count):
            raise DataError(f"{len(labels):,} {title} examples instead of {count:,}")
        if labels.min() < 0 or labels.max() >= entry.classes:
            raise DataError(f"there are {title} labels outside 0 to {entry.classes - 1}")
