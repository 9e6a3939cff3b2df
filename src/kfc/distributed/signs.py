"""What a rank says of itself, and what others make of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

# As long as nothing was heard of a rank, it is taken to be alive.
SILENT_SECONDS = 2.0

End = Literal["", "left", "failed"]


@dataclass(frozen=True)
class Sign:
    """What a rank has last said of itself.

    Attributes:
        beat: grows as long as it lives.
        step: it was in; ``None`` before the first.
        clock: its wall clock then, in seconds.
        suffers: from the fault of another, as the rank that asks does.
        end: how it ended, if it has.
        reason: why, in its own words.
    """

    beat: int = 0
    step: int | None = None
    clock: float = 0.0
    suffers: bool = False
    end: End = ""
    reason: str = ""

    @property
    def is_confession(self) -> bool:
        """Whether the rank has ended on its own account."""
        return self.end != "" and not self.suffers


def judge(
    before: Sign | None, after: Sign | None, seconds: float, own_step: int | None
) -> tuple[int, str]:
    """How little suspicious a rank is, and what is known of it.

    Args:
        before: its sign, read first.
        after: read last.
        seconds: between the two.
        own_step: of the rank that asks.
    """
    if after is None:
        return 0, "has not begun to train"
    is_elsewhere, where = after.step != own_step, _where(after.step, own_step)
    if after.suffers:
        sentence = f"failed in the same way, {where}: perhaps each waited for the other"
        return 1 if is_elsewhere else 3, sentence
    if after.end == "failed":
        return 0, f"failed {_at(after.step)}: {after.reason}"
    if after.end == "left":
        why = after.reason or "it ended, perhaps with fewer batches"
        return 0, f"left {where}: {why}"
    silence = max(seconds, time.time() - after.clock)
    if before is not None and before.beat == after.beat and silence > SILENT_SECONDS:
        since = f"for {silence:.0f} s, when it was {_at(after.step)}"
        return 0, f"has not been heard of {since}: it was killed or stopped, or is stuck"
    return 1 if is_elsewhere else 2, f"is alive, {where}: it waits elsewhere, or is slow"


def _where(step: int | None, own_step: int | None) -> str:
    also = " as this rank" if step == own_step else f", while this rank is {_at(own_step)}"
    return _at(step) + also


def _at(step: int | None) -> str:
    return "before its first step" if step is None else f"at step {step}"
