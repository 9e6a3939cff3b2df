"""Checks that all ranks are about to do the same, before they exchange anything else.

A message has another size if ranks differ in their model, options, state or number of passes.
gloo ends a process that receives a message of another size than it expects, and nccl waits for
ever. Therefore, the first message of a step has the same size whatever follows: each rank sends a
digest of what it is about to do, and two numbers that it would send anyway. If the digests differ,
the ranks exchange descriptions, and all of them raise an error that names the differences.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kfc.distributed.consistency import fingerprint
from kfc.distributed.ranks import CollectiveError, Ranks

# The numbers that a rank may send with its digest.
MOST_NUMBERS = 2
# The differences between two ranks that an error lists.
MOST_DIFFERENCES = 5

# What a rank does or is, by a name that errors use.
Description = Mapping[str, str]


def digest_of(value: Any) -> int:
    """Return a checksum of 32 bits of nested containers of tensors, numbers and strings."""
    if isinstance(value, Mapping):
        parts: Sequence[Any] = [part for item in value.items() for part in item]
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, Tensor):
        parts = [tuple(value.shape), str(value.dtype), int(fingerprint(value))]
    else:
        return zlib.crc32(repr(value).encode())
    return zlib.crc32(repr([digest_of(part) for part in parts]).encode())


class Agreement:
    """Compares what the ranks of a group are about to do."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._fixed: dict[str, str] = {}
        self._digest = 0
        self._current: Callable[[], Description] = dict

    def set_up(self, fixed: Description, current: Callable[[], Description]) -> None:
        """Set what is compared beside what a rank does.

        Args:
            fixed: what does not change.
            current: returns what may change between steps.
        """
        self._fixed, self._current = dict(fixed), current
        self._digest = digest_of(self._fixed)

    def reach(
        self, doing: Description, numbers: Sequence[float] = (), problem: str = ""
    ) -> list[list[float]]:
        """Raise an error on all ranks if they differ; return the numbers of every rank.

        Args:
            doing: what this rank is about to do.
            numbers: at most two numbers to be sent to all ranks.
            problem: why this rank cannot continue; raised on all ranks.
        """
        own = {**doing, **self._current()}
        padded = [*numbers, *[0.0] * (MOST_NUMBERS - len(numbers))]
        sent = [float(digest_of([self._digest, own])), float(bool(problem)), *padded]
        rows = self._ranks.gather(sent, "checks")
        if any(row[:2] != [rows[0][0], 0.0] for row in rows):
            self._raise({**own, **self._fixed}, problem)
        return [row[2 : 2 + len(numbers)] for row in rows]

    def _raise(self, own: Description, problem: str) -> None:
        texts = self._ranks.gather_text(json.dumps([own, problem]))
        found = [json.loads(text) for text in texts]
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
        if problems:
            raise CollectiveError("; ".join(problems))
        listed = [
            difference
            for rank, (other, _) in enumerate(found)
            for difference in _differences(rank, other, found[0][0])
        ]
        step = found[0][0].get("step", "1")
        raise CollectiveError(
            f"the ranks disagree at step {step} and would train different models:"
            + "".join(f"\n  {each}" for each in listed)
        )


def _differences(rank: int, other: Description, first: Description) -> list[str]:
    """Return sentences about the differences between a rank and rank 0."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    found = [
        f"{name} is {other.get(name, 'missing')} on rank {rank}, and "
        f"{first.get(name, 'missing')} on rank 0"
        for name in names[:MOST_DIFFERENCES]
    ]
    more = len(names) - MOST_DIFFERENCES
    return [*found, f"{more} more differences on rank {rank}"] if more > 0 else found
