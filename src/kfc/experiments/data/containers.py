"""Reading named files from a folder or an archive into memory, never more than was announced.

Nothing is unpacked to disk: an archive has no way to write outside its folder.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from kfc.experiments.data.sets import DataError

Read = Callable[[str], bytes]
"""The content of the file of that name; a DataError if it is missing or too large."""

# Headers, padding and small companions (a readme, a list of class names) beside the data.
ARCHIVE_MARGIN = 4 << 20
MOST_MEMBERS = 100  # the archives we know have a dozen


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's bytes, unpacked if its name ends in .gz or .tgz; refused beyond ``limit`` bytes."""
    if not path.is_file():  # a pipe in its place would make us wait for ever
        raise DataError(f"{path.name} is not a file")
    packed = path.suffix in (".gz", ".tgz")
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path.name} is truncated or not a gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise DataError(f"{path.name} holds more than {limit:,} bytes")
    return content


def present(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder, plain or with .gz after it."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.exists()), None)


def folder_reader(folder: Path, limits: Mapping[str, int]) -> Read:
    """Reads files that lie in a folder."""

    def read(name: str) -> bytes:
        path = present(folder, name)
        if path is None:
            raise DataError(f"{name} is missing")
        return read_bounded(path, limits[name])

    return read


def archive_reader(path: Path, root: str, limits: Mapping[str, int]) -> Read:
    """Reads members of a .tar.gz from its folder ``root``; all of it is unpacked into memory."""
    content = read_bounded(path, sum(limits.values()) + ARCHIVE_MARGIN)
    try:
        archive = tarfile.TarFile(fileobj=io.BytesIO(content))
        members = {member.name: member for member in _members(archive)}
    except Exception as error:  # tarfile raises many kinds on crafted headers
        raise DataError(f"{path.name} is not a tar archive ({error})") from error
    for name in members:
        _refuse_outside(path, name)

    def read(name: str) -> bytes:
        member = members.get(f"{root}/{name}")
        if member is None or not member.isreg():
            raise DataError(f"{path.name} has no file {root}/{name}")
        if member.size > limits[name]:
            raise DataError(f"{name} in {path.name} holds more than {limits[name]:,} bytes")
        return _member_content(path, archive, member)

    return read


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """One after the other, each behind the last.

    ``getmembers`` never ends where a negative size leads back to a header that was read before.
    """
    position = -1
    for count, member in enumerate(iter(archive.next, None)):
        if member.size < 0 or member.offset <= position:
            raise tarfile.ReadError(f"{member.name!r} has a size below zero")
        if count == MOST_MEMBERS:
            raise tarfile.ReadError(f"it has more than {MOST_MEMBERS} members")
        position = member.offset
        yield member


def _refuse_outside(archive: Path, name: str) -> None:
    member = PurePosixPath(name)
    if member.is_absolute() or ".." in member.parts:
        raise DataError(f"{archive.name} has a member that points outside of it: {name!r}")


def _member_content(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    try:
        file = archive.extractfile(member)
        content = file.read() if file else b""
    except Exception as error:  # as above: sparse maps and offsets may be crafted
        raise DataError(f"{member.name} in {path.name} cannot be read ({error})") from error
    if len(content) != member.size:
        raise DataError(f"{member.name} in {path.name} is truncated")
    return content
