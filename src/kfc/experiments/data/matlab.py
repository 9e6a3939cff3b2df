"""Numeric arrays from MATLAB files of version 5, with every size checked before it is used.

scipy reads these files too, but a damaged one can end the whole process in its compiled code.

A file is a header and parts. A part is a tag (kind and size) and content; content that is packed
holds one part. An array is a part whose content is again parts: flags, shape, name, values.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.sets import DataError

HEADER = 128
LITTLE_ENDIAN_VERSION_5 = b"\x00\x01IM"
ARRAY, PACKED = 14, 15
STORED_AS = {
    1: "i1",
    2: "u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
}

Part = tuple[int, memoryview]
"""Kind and content."""


def read_arrays(name: str, content: bytes, largest: int) -> dict[str, NDArray[Any]]:
    """The arrays by name; a file that unpacks to more than ``largest`` bytes is refused."""
    if content[HEADER - 4 : HEADER] != LITTLE_ENDIAN_VERSION_5:
        raise DataError(f"{name} is not a little-endian MATLAB file of version 5")
    try:
        return dict(_arrays(memoryview(content)[HEADER:], largest))
    except (ValueError, zlib.error, struct.error) as error:
        raise DataError(f"{name} is truncated or damaged ({error})") from error


def _arrays(content: memoryview, room: int) -> Iterator[tuple[str, NDArray[Any]]]:
    for part in _parts(content):
        (kind, body), size = _unpacked(part, room)
        room -= size
        if room <= 0:
            raise ValueError("it holds too much")
        if kind == ARRAY:
            yield _array(body)


def _parts(content: memoryview) -> Iterator[Part]:
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from("<II", content, position)
        start = position + 8
        if kind >> 16:  # short form: size and kind in one word, up to four bytes after it
            kind, size, start = kind & 0xFFFF, kind >> 16, position + 4
        if start + size > len(content) or (start == position + 4 and size > 4):
            raise ValueError("a part is longer than the file")
        yield kind, content[start : start + size]
        end = start + size
        # Packed parts follow each other closely, all others begin at multiples of eight bytes.
        position = end if kind == PACKED else -(-end // 8) * 8


def _unpacked(part: Part, room: int) -> tuple[Part, int]:
    """The part without its packing, and how many bytes it takes in memory."""
    kind, content = part
    if kind != PACKED:
        return part, len(content)
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(content, room)
    if not unpacker.eof:
        raise ValueError(f"a packed part is cut off or has more than {room:,} bytes")
    parts = list(islice(_parts(memoryview(plain)), 2))
    if len(parts) != 1:
        raise ValueError("a packed part holds nothing, or more than one part")
    return parts[0], len(plain)


def _array(content: memoryview) -> tuple[str, NDArray[Any]]:
    parts = list(islice(_parts(content), 5))
    if len(parts) != 4:
        raise ValueError("there is something other than arrays of real numbers")
    _, (_, lengths), (_, name), (kind, values) = parts
    if kind not in STORED_AS:
        raise ValueError(f"values are of the unknown kind {kind}")
    shape = struct.unpack(f"<{len(lengths) // 4}i", lengths)
    array = np.frombuffer(values, STORED_AS[kind])
    if min(shape, default=0) < 0 or math.prod(shape) != array.size:
        raise ValueError(f"{array.size:,} values for the shape {shape}")
    return bytes(name).decode("latin1"), array.reshape(shape, order="F")
