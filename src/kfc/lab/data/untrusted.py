"""Read pickles and MATLAB files that may be damaged or hostile."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kfc.lab.data.datasets import DataError

# The opcodes and globals of CIFAR-10's pickles.
STRINGS = {"SHORT_BINSTRING", "BINSTRING", "UNICODE", "BINUNICODE"}
TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
GETS = {"GET", "BINGET", "LONG_BINGET"}
ALLOWED = STRINGS | TUPLES | PUTS | GETS
ALLOWED |= {"NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG1", "BININT", "BININT1", "BININT2"}
ALLOWED |= {"EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"}
ALLOWED |= {"PROTO", "MARK", "GLOBAL", "REDUCE", "BUILD", "STOP"}
REUSABLE = STRINGS | {"GLOBAL", "REDUCE"}
MAX_OPCODES = 1 << 20  # a batch has about 50,000
MAX_TUPLES = 20  # that are not the arguments of a call; a batch has four
GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}

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


def read_pickle(name: str, content: bytes) -> dict[Any, Any]:
    """Return the dictionary of a pickle, without running any code that it names.

    It may contain strings, integers, lists, and arrays of type uint8, as in CIFAR-10's Python
    archive. Opcodes and globals that such a file does not need are refused. The opcodes are checked
    before unpickling, because the C unpickler trusts the file: a memo index of 2^31 allocates
    16 GB, and the hash of a deeply nested tuple overflows the stack or does not terminate.
    """
    try:
        _check_opcodes(content)
        value = _Unpickler(content).load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dictionary")
        return {k: v.array() if isinstance(v, _StandIn) else v for k, v in value.items()}
    except Exception as error:  # the unpickler raises any type of exception on damaged files
        raise DataError(f"{name} is not a pickle of plain data: {error}") from error


class _StandIn:
    """Stands in for an array or a dtype of numpy, and only keeps what the file says of it."""

    state: tuple[Any, ...] | None = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> NDArray[np.uint8] | None:
        """Return the array, which must consist of bytes in row-major order."""
        if self.state is None:
            return None
        _, shape, dtype, is_fortran, content = self.state
        if dtype.arguments[0] not in ("u1", b"u1") or is_fortran:
            raise pickle.UnpicklingError("an array is not of type uint8 in row-major order")
        return np.frombuffer(content, np.uint8).reshape(shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._remaining = len(content)

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in GLOBALS:
            raise pickle.UnpicklingError(f"the global {module}.{name} is not allowed")
        return _StandIn

    def _encode(self, text: str, encoding: object) -> bytes:
        """Return a byte string, which Python 3 pickles as latin1 text in old protocols."""
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("a string has another encoding than latin1")
        self._remaining -= len(text)
        if self._remaining < 0:
            raise pickle.UnpicklingError("the strings are longer than the file")
        return text.encode("latin1")


def _check_opcodes(content: bytes) -> None:
    """Refuse opcodes that need much memory or time, without running them."""
    memo: dict[int, str] = {}  # the opcode that made each object
    last, tuples = "", 0
    for count, (opcode, value, _) in enumerate(pickletools.genops(content)):
        name, argument = opcode.name, cast(int, value)  # only the memo index is used
        if name not in ALLOWED:
            raise pickle.UnpicklingError(f"the opcode {name} is not allowed")
        if count == MAX_OPCODES:
            raise pickle.UnpicklingError(f"it has more than {MAX_OPCODES:,} opcodes")
        if name in PUTS:
            if argument >= MAX_OPCODES:
                raise pickle.UnpicklingError(f"the memo index {argument:,} is too large")
            memo[argument] = last
            continue
        if name in GETS and memo.get(argument) not in REUSABLE:
            raise pickle.UnpicklingError("an object that is not a string is used twice")
        # Tuples may be keys of dictionaries, so their depth must be small. The arguments of a call
        # do not count: there is a call for each byte string that Python 3 wrote.
        tuples += (name in TUPLES) - (name == "REDUCE" and last in TUPLES)
        if tuples > MAX_TUPLES:
            raise pickle.UnpicklingError(f"it has more than {MAX_TUPLES} tuples")
        last = name


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
