"""Reading the pickles of CIFAR-10's Python archive without running anything they name.

The files are dictionaries of byte strings, lists of numbers and one numpy array, in protocol 2. The
few names that such an array needs stand for harmless objects of ours; any other name is refused.
Nothing may take more memory or time than the size of the file explains.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.sets import DataError


class _ArrayState:
    """Keeps what numpy would have been told about an array of bytes."""

    array: NDArray[np.uint8] | None = None

    def __init__(self, *_: object) -> None:
        """An array's type and first shape are replaced by its state."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Kind) or kind.code not in ("u1", b"u1") or by_columns:
            raise pickle.UnpicklingError("only arrays of bytes, row by row, are read")
        self.array = np.frombuffer(content, np.uint8).reshape(shape)


class _Kind:
    """A numpy dtype's name and nothing else."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, _: object) -> None:
        """Byte order and alignment mean nothing for single bytes."""


class _Dictionary(dict[object, object]):
    """Refuses keys other than strings: the hash of nested tuples can take for ever."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, (bytes, str)):
            raise pickle.UnpicklingError("a dictionary has a key that is not a string")
        super().__setitem__(key, value)


def _load_dictionary(unpickler: Any) -> None:
    unpickler.append(_Dictionary())


def _load_dictionary_of_items(unpickler: Any) -> None:
    items, dictionary = unpickler.pop_mark(), _Dictionary()
    for key, value in zip(items[::2], items[1::2], strict=True):
        dictionary[key] = value
    unpickler.append(dictionary)


class _Instructions(dict[int, Callable[..., None]]):
    """What the unpickler can do, by the instruction's byte."""

    def __missing__(self, code: int) -> Callable[..., None]:
        raise pickle.UnpicklingError(f"instruction {code:#04x} is not one of protocol 2")


KNOWN_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _ArrayState,
    ("numpy._core.multiarray", "_reconstruct"): _ArrayState,
    ("numpy", "ndarray"): _ArrayState,
    ("numpy", "dtype"): _Kind,
}
PROTOCOL_2 = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.proto <= 2}


# The unpickler written in Python: the one in C reserves memory by numbers that stand in the file.
# So do instructions of later protocols (a bytearray's length) in both.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc,unused-ignore]
    dispatch = _Instructions(
        {code: load for code, load in pickle._Unpickler.dispatch.items() if code in PROTOCOL_2}
        | {pickle.EMPTY_DICT[0]: _load_dictionary, pickle.DICT[0]: _load_dictionary_of_items}
    )

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._room = len(content)

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        try:
            return KNOWN_NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run") from None

    def _encode(self, text: str, encoding: object) -> bytes:
        """How Python 3 writes byte strings for Python 2; every one stands in the file itself."""
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("a string has an encoding other than latin1")
        self._room -= len(text)
        if self._room < 0:
            raise pickle.UnpicklingError("its strings hold more bytes than the file")
        return text.encode("latin1")


def read_pickle(name: str, content: bytes) -> object:
    """The pickled object; in a dictionary, arrays of bytes are numpy arrays."""
    try:
        value = _Unpickler(content).load()
    except Exception as error:  # a damaged pickle makes the unpickler raise errors of any kind
        raise DataError(f"{name} is not a pickle of plain data: {error}") from error
    if not isinstance(value, dict):
        return value
    return {k: v.array if isinstance(v, _ArrayState) else v for k, v in value.items()}
