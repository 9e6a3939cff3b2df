"""Read the pickles of CIFAR-10's Python archive without running any code that they name.

The files are dictionaries of byte strings, lists of integers and one numpy array. Opcodes and
globals that such a file does not need are refused. The opcodes are checked before unpickling,
because the C unpickler trusts the file: a memo index of 2^31 allocates 16 GB, and the hash of a
deeply nested tuple overflows the stack or does not terminate.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kfc.lab.data.datasets import DataError

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


def read_pickle(name: str, content: bytes) -> dict[Any, Any]:
    """Return the pickled dictionary; its arrays are of type uint8."""
    try:
        _check_opcodes(content)
        value = _Unpickler(content).load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dictionary")
        return {k: v.array() if isinstance(v, _StandIn) else v for k, v in value.items()}
    except Exception as error:  # the unpickler raises any type of exception on damaged files
        raise DataError(f"{name} is not a pickle of plain data: {error}") from error


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
