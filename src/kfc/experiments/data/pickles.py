"""Reading the pickles of CIFAR-10's Python archive without running anything they name.

The files are dictionaries of byte strings, lists of numbers and one numpy array. The few names that
such an array needs stand for harmless objects of ours; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.sets import DataError


class _ArrayState:
    """Keeps what numpy would have been told about an array of bytes."""

    def __init__(self, *_: object) -> None:
        self.array: NDArray[np.uint8] | None = None

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


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes byte strings for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


KNOWN_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _ArrayState,
    ("numpy._core.multiarray", "_reconstruct"): _ArrayState,
    ("numpy", "ndarray"): _ArrayState,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


# The unpickler written in Python: the one in C reserves memory by numbers that stand in the file.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc,unused-ignore]
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        try:
            return KNOWN_NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run") from None


def read_pickle(name: str, content: bytes) -> object:
    """The pickled object; in a dictionary, arrays of bytes are numpy arrays."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle makes the unpickler raise errors of any kind
        raise DataError(f"{name} is not a pickle of plain data: {error}") from error
    if not isinstance(value, dict):
        return value
    return {k: v.array if isinstance(v, _ArrayState) else v for k, v in value.items()}
