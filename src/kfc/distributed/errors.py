"""Errors of collectives: how they are told from others."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

# What gloo, NCCL and torch say when a peer is gone; gloo names a file of its source.
WORDS_OF_COLLECTIVES = (
    *("gloo", "nccl", "closed by peer", "reset by peer"),
    *("timed out waiting", "caused pair closure", "watchdog caught"),
)


def is_of_collective(error: BaseException | None) -> bool:
    """Whether it, or what led to it, is what a collective raises if a peer is gone."""
    return any(map(_is_itself_of_collective, with_causes(error)))


def _is_itself_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in WORDS_OF_COLLECTIVES)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
