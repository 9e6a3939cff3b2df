"""Which rank is the cause when a collective fails.

A collective that fails knows that a connection was closed or that the time was over, not what
became of the other side. So every rank puts a sign of life, with its step, on a board that all can
read, the store of the process group; and before it ends it says there why.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize

import torch.distributed as dist

from kfc.distributed.board import PATIENCE_SECONDS, Board
from kfc.distributed.errors import is_of_collective, with_causes
from kfc.distributed.signs import End, Sign, judge

# A step does not wait for its sign: to wake a thread takes 50 µs, or milliseconds if all cores are
# at work. So what is known of a rank that was killed is up to a beat old.
BEAT_SECONDS = 0.5
LISTEN_SECONDS = 3.0
READ_SECONDS = 0.2
NAMED_AT_MOST = 4


def start_watch(group: dist.ProcessGroup) -> Watch | None:
    """A watch of the group; ``None`` if its store is not of the kind that ranks can meet at."""
    try:
        return Watch(group)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None


class Watch:
    """Shows the other ranks of a group that this one lives, and finds out which of them does not.

    Nothing here raises or waits for long: a thread, common to all watches, talks to the store.

    Args:
        group: all its ranks make as many watches of it, in the same order.

    Raises:
        ValueError: if the group's store has no server.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.suffers = False  # from the fault of another rank
        self._names = _names_of_ranks(group)
        self._holder = _holder_of_store(group)
        self._board = Board(group)
        self.step: int | None = None
        self._end: End = ""
        self._reason = ""
        self._sign = Sign()
        self._listening = False
        self._heard: _Heard | None = None
        self._talked = threading.Condition()
        self._heart = _heart_of_this_process()
        self._heart.add(self)

    def at(self, step: int) -> None:
        """Note the step that this rank is in, or that comes next."""
        self.step = step

    def leave(self, reason: str = "", end: End = "left") -> None:
        """Tell the others that this rank takes no further part."""
        if self.is_over or not self._heart.is_of_this_process:
            return
        self.retire(reason, end)
        self._heart.wake.set()
        latest = time.monotonic() + PATIENCE_SECONDS
        with self._talked:
            while not self.is_over and (left := latest - time.monotonic()) > 0:
                self._talked.wait(left)

    def retire(self, reason: str = "", end: End = "left") -> None:
        """The same with the next beat.

        It takes no lock, and so may happen in the midst of anything, as garbage collection does.
        """
        self._reason = reason
        self._end = end

    def close(self) -> None:
        """End this rank's part normally."""
        self.leave()

    def explain(self) -> str:
        """Why a collective has just failed on this rank: what became of the others.

        Takes as long as it takes to be sure that a rank is silent, :data:`LISTEN_SECONDS`.
        """
        try:
            return self._explain()
        except Exception as error:  # there is an error already, which is to be seen
            return f"the other ranks could not be asked: {error}"

    # What the thread does

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be said."""
        return self._sign.end != "" or (self._board.is_gone and self._end != "")

    @property
    def is_listening(self) -> bool:
        return self._listening

    def talk(self) -> None:
        """Show that this rank lives, and read what the others say if that is asked for."""
        if not self._board.is_gone:
            try:
                self._show_sign()
                self._read_signs()
            except Exception:  # whoever holds the store has ended, perhaps as all ranks do
                self._board.is_gone = True
        with self._talked:
            self._talked.notify_all()

    def hang_up(self) -> None:
        self._board.close()

    def _show_sign(self) -> None:
        beat, now = self._sign.beat + 1, time.time()
        sign = Sign(beat, self.step, now, self.suffers, self._end, self._reason)
        self._board.write(self.rank, sign)
        self._sign = sign

    def _read_signs(self) -> None:
        if self._listening:
            signs = [self._board.read(rank) for rank in range(self.size)]
            self._heard = _Heard(time.monotonic(), signs)

    # What the rank does that asks

    def _explain(self) -> str:
        if not self._heart.is_of_this_process or self.is_over:
            return "this rank had left the others"
        self.suffers = True
        first, last = self._listen()
        if first is None or last is None or not self._tells_the_cause(last):
            sentence = _about_store(self._board.is_gone)
            self._board.is_gone = True  # so that nobody waits for it when this process ends
            return sentence
        return self._verdict(first, last)

    def _tells_the_cause(self, heard: _Heard) -> bool:
        """Not if the store has ceased to answer since: then all ranks seem to be silent.

        Unless rank 0, which held it, was itself a victim: it has just ended a little earlier.
        """
        if heard.has_confession:
            return True
        if self._board.is_gone:
            holder = None if self._holder is None else heard.signs[self._holder]
            return holder is not None and holder.suffers
        return time.monotonic() - heard.time < PATIENCE_SECONDS

    def _listen(self) -> tuple[_Heard | None, _Heard | None]:
        """What was heard first and last, within some seconds or until a rank says why."""
        first = self._heard = None
        self._listening = True
        self._heart.wake.set()
        latest = time.monotonic() + LISTEN_SECONDS
        while (left := latest - time.monotonic()) > 0 and not self._board.is_gone:
            with self._talked:
                self._talked.wait(min(left, READ_SECONDS))
            first = first or self._heard
            if self._heard is not None and self._heard.has_confession:
                # Others may be about to say the same.
                latest = min(latest, time.monotonic() + 2 * READ_SECONDS)
        self._listening = False
        return first, self._heard

    def _verdict(self, first: _Heard, last: _Heard) -> str:
        """About the most suspicious ranks."""
        sentences: dict[int, list[str]] = {}
        for rank, (before, after) in enumerate(zip(first.signs, last.signs, strict=True)):
            if rank != self.rank:
                innocence, sentence = judge(before, after, last.time - first.time, self.step)
                sentences.setdefault(innocence, []).append(f"{self._names[rank]} {sentence}")
        suspects = sentences[min(sentences)]
        named = suspects[:NAMED_AT_MOST]
        if len(suspects) > len(named):
            named.append(f"and so on: {len(suspects)} ranks in all")
        return "; ".join(named)


@dataclass(frozen=True)
class _Heard:
    """What was on the board at a time of this process's clock, of each rank."""

    time: float
    signs: Sequence[Sign | None]

    @property
    def has_confession(self) -> bool:
        return any(sign is not None and sign.is_confession for sign in self.signs)


# The thread


class _Heart(threading.Thread):
    """Lets all watches of this process talk, at every beat."""

    def __init__(self) -> None:
        super().__init__(name="kfc-watch", daemon=True)
        self.watches: list[Watch] = []
        self.wake = threading.Event()
        self._process = os.getpid()
        # Rather than `atexit`, without which processes of multiprocessing end.
        Finalize(None, _end_watches, exitpriority=100)
        self.start()

    @property
    def is_of_this_process(self) -> bool:
        """Not so in a process that was forked: there the thread is not."""
        return self._process == os.getpid()

    def add(self, watch: Watch) -> None:
        self.watches.append(watch)
        self.wake.set()

    def run(self) -> None:
        while True:
            self.wake.wait(self._seconds_to_rest())
            self.wake.clear()
            for watch in tuple(self.watches):
                watch.talk()
                if watch.is_over:
                    self.watches.remove(watch)
                    watch.hang_up()

    def _seconds_to_rest(self) -> float | None:
        if not self.watches:
            return None
        return READ_SECONDS if any(watch.is_listening for watch in self.watches) else BEAT_SECONDS


_heart: _Heart | None = None


def _heart_of_this_process() -> _Heart:
    global _heart
    if _heart is None or not _heart.is_of_this_process:
        _heart = _Heart()
    return _heart


# Sentences


def _names_of_ranks(group: dist.ProcessGroup) -> list[str]:
    """Ranks as the group counts them; in a part of all processes, also as torch does."""
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(dist.get_world_size())):
        return [f"rank {rank}" for rank in ranks]
    return [f"rank {rank} (of all processes: {of_all})" for rank, of_all in enumerate(ranks)]


def _about_store(is_gone: bool) -> str:
    holder = "the launcher" if _launcher_holds_store() else "rank 0"
    gone, mute = "it ended before this rank, or was killed", "it was stopped, or cannot be reached"
    what = f"is gone: {gone}" if is_gone else f"does not answer: {mute}"
    return f"{holder}, which holds the group's store, {what}"


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _holder_of_store(group: dist.ProcessGroup) -> int | None:
    """The rank in the group of the process that holds the store, if that is in the group."""
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(0) if 0 in ranks and not _launcher_holds_store() else None


# The end of the process


def _end_watches() -> None:
    """Say why this process ends; if by a collective of someone else's, also who is the cause."""
    if _heart is None or not _heart.is_of_this_process:
        return
    watches, error = list(_heart.watches), _uncaught_error()
    if watches and is_of_collective(error) and not any(watch.suffers for watch in watches):
        _print_explanation(max(watches, key=lambda watch: watch.step or 0))
    end, reason = _end_by(error)
    suffers = any(watch.suffers for watch in watches)
    for watch in watches:
        watch.suffers = suffers  # the process does, whichever of them has found out
        watch.leave(reason, end)


def _print_explanation(watch: Watch) -> None:
    explanation = f"kfc: rank {watch.rank} of {watch.size}: {watch.explain()}"
    with suppress(Exception):
        print(explanation, file=sys.stderr, flush=True)


def _uncaught_error() -> BaseException | None:
    """The error by which this process ends.

    The interpreter leaves it behind; multiprocessing is just handling it.
    """
    left_behind = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return sys.exc_info()[1] or left_behind


def _end_by(error: BaseException | None) -> tuple[End, str]:
    # torch.multiprocessing exits with a code after an error.
    errors = [cause for cause in with_causes(error) if not isinstance(cause, SystemExit)]
    if not errors:
        return "left", ""
    first_line = str(errors[0]).partition("\n")[0]
    return "failed", f"{type(errors[0]).__name__}: {first_line}"
