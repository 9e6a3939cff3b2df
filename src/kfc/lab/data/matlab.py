"""Read the numeric arrays of MATLAB files that may be damaged or hostile."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.lab.data.datasets import DataError

# MATLAB files of version 5: a header, then elements of (type, size, data). A variable is an element
# of type ARRAY, or COMPRESSED with an ARRAY inside. An ARRAY has the elements flags, shape, name
# and values.
MAGIC = b"\x00\x01IM"  # version 5, little-endian
HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + MAGIC
ARRAY, COMPRESSED = 14, 15
INT8, INT32, UINT32 = 1, 5, 6
FLAGS = struct.pack("<II", UINT32, 8)
NUMERIC_TYPES = {1, 2, 3, 4, 5, 6, 7, 9, 12, 13}
NUMERIC_CLASSES = range(6, 16)
COMPLEX = 0x08


def load_arrays(name: str, content: bytes, limit: int) -> dict[str, NDArray[Any]]:
    """Return the numeric arrays of a MATLAB file by name.

    ``scipy.io.loadmat`` trusts the types and sizes in a file: a wrong type crashes the process, and
    a wrong size allocates up to 4 GB. So the structure is checked before scipy reads the file, and
    a file with more than ``limit`` decompressed bytes is refused.
    """
    from scipy.io import loadmat  # slow to import, and only this data set needs it

    if content[len(HEADER) - len(MAGIC) : len(HEADER)] != MAGIC:
        raise DataError(f"{name} is not a little-endian MATLAB file of version 5")
    variables = memoryview(content)[len(HEADER) :]
    try:
        _check_variables(variables, limit)
        # Our own header: scipy takes the file's version from the first bytes of the description.
        arrays: dict[str, Any] = loadmat(io.BytesIO(b"".join((HEADER, variables))))
    except Exception as error:  # scipy raises many types of exceptions on damaged files
        raise DataError(f"{name} is truncated or damaged ({error})") from error
    return {key: value for key, value in arrays.items() if isinstance(value, np.ndarray)}


def _check_variables(content: memoryview, limit: int) -> None:
    """Check every variable of a file; decompress at most ``limit`` bytes."""
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from("<II", content, position)
        data = content[position + 8 : position + 8 + size]
        position += 8 + size
        if limit <= 0:  # zlib would take 0 for no limit
            raise ValueError("the variables are too large")
        if kind == COMPRESSED:
            decompressor = zlib.decompressobj()
            plain = memoryview(decompressor.decompress(data, limit))
            if not decompressor.eof:
                raise ValueError(f"a variable is truncated or has more than {limit:,} bytes")
            kind, size = struct.unpack_from("<II", plain)
            data = plain[8:]
        if kind != ARRAY or len(data) != size:
            raise ValueError("a variable is truncated or not an array")
        _check_array(data)
        limit -= 8 + size


def _check_array(data: memoryview) -> None:
    """Check that an array consists of flags of 8 bytes, a shape, a name and real numbers."""
    types = tuple(_element_types(data))
    is_real = data[:8] == FLAGS and data[8] in NUMERIC_CLASSES and not data[9] & COMPLEX
    if types[:3] != (UINT32, INT32, INT8) or not is_real:
        raise ValueError("a variable is not an array of real numbers")
    if len(types) != 4 or types[3] not in NUMERIC_TYPES:
        raise ValueError(f"an array has elements of the types {types}, not one of numbers")


def _element_types(data: memoryview) -> Iterator[int]:
    """Yield the type of each element, after a check that it ends within the data."""
    position = 0
    while position < len(data):
        kind, size = struct.unpack_from("<II", data, position)
        if kind >> 16:  # short form: size and type in one word, then up to four bytes
            kind, size, end = kind & 0xFFFF, kind >> 16, position + 8
        else:
            end = position + 8 + size
        if end > len(data) or (end == position + 8 and size > 4):
            raise ValueError("an element is longer than its variable")
        yield kind
        position = -(-end // 8) * 8  # elements start at multiples of eight bytes
