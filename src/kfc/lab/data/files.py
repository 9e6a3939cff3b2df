"""Read named files from a folder or an archive into memory, within size limits.

Nothing is unpacked to disk, so an archive cannot write outside its folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from kfc.lab.data.datasets import DataError

Files = Mapping[str, bytes]

ARCHIVE_MARGIN = 4 << 20  # bytes for headers, padding and small extra files (a readme)
MAX_MEMBERS = 100  # the known archives have a dozen


def create_folder(folder: Path) -> None:
    """Create a folder of data and its parents, if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the data folder {folder} cannot be created: {error.strerror}; name another with "
            "--data-dir or KFC_DATA_DIR"
        ) from error


def read_limited(path: Path, limit: int) -> bytes:
    """Return a file's bytes, decompressed if it is .gz or .tgz, and at most ``limit`` of them."""
    if not path.is_file():  # reading a named pipe would block forever
        raise DataError(f"{path.name} is not a file")
    compressed = path.suffix in (".gz", ".tgz")
    try:
        with gzip.open(path) if compressed else path.open("rb") as file:
            content = file.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path.name} is truncated or not a gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise DataError(f"{path.name} holds more than {limit:,} bytes")
    return content


def file_in(folder: Path, name: str) -> Path | None:
    """Return the path of the file ``name`` or ``name.gz`` in the folder, or None."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.exists()), None)


def read_folder(folder: Path, limits: Mapping[str, int]) -> Files:
    """Return the files of a folder, whose maximum sizes are ``limits``."""
    files = {}
    for name, limit in limits.items():
        path = file_in(folder, name)
        if path is None:
            raise DataError(f"{name} is missing")
        files[name] = read_limited(path, limit)
    return files


def read_archive(path: Path, root: str, limits: Mapping[str, int]) -> Files:
    """Return the files in the folder ``root`` of a .tar.gz archive."""
    content = read_limited(path, sum(limits.values()) + ARCHIVE_MARGIN)
    try:
        archive = tarfile.TarFile(fileobj=io.BytesIO(content))
        members = {member.name: member for member in _members(archive)}
    except Exception as error:  # tarfile raises many types of exceptions on crafted headers
        raise DataError(f"{path.name} is not a valid tar archive ({error})") from error
    files = {}
    for name, limit in limits.items():
        member = members.get(f"{root}/{name}")
        if member is None or not member.isreg():
            raise DataError(f"{path.name} has no file {root}/{name}")
        if member.size > limit:
            raise DataError(f"{name} in {path.name} holds more than {limit:,} bytes")
        try:
            file = archive.extractfile(member)
            files[name] = file.read() if file else b""
        except Exception as error:  # sparse maps and offsets may be crafted, too
            raise DataError(f"{name} in {path.name} cannot be read ({error})") from error
        if len(files[name]) != member.size:
            raise DataError(f"{name} in {path.name} is truncated")
    return files


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members in order of their position in the archive.

    ``getmembers`` does not terminate if a negative size leads back to an earlier header.
    """
    position = -1
    for count, member in enumerate(iter(archive.next, None)):
        if member.size < 0 or member.offset <= position:
            raise tarfile.ReadError(f"{member.name!r} has a negative size")
        if count == MAX_MEMBERS:
            raise tarfile.ReadError(f"it has more than {MAX_MEMBERS} members")
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise tarfile.ReadError(f"{member.name!r} points outside the archive")
        position = member.offset
        yield member


def checksum(path: Path, like: str = "md5:") -> str:
    """Return a file's checksum in the form of another one, such as ``md5:0123...``."""
    algorithm = like.split(":")[0]
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(
                file, partial(hashlib.new, algorithm, usedforsecurity=False)
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return f"{algorithm}:{digest.hexdigest()}"
