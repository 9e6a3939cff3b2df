"""Which rank is the cause when a collective fails.

A collective that fails knows that a connection was closed or that the time was over, not what
became of the other side. So every rank puts a sign of life, with its step, on a board that all can
read, the store of the process group; and before it ends it says there why.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch.distributed as dist

# A step does not wait for its sign: to wake a thread takes 50 µs, or milliseconds if all cores are
# at work. So what is known of a rank that was killed is up to a beat old.
BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.0
LISTEN_SECONDS = 3.0
READ_SECONDS = 0.2
# For a store that takes long to answer.
PATIENCE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
NAMED_AT_MOST = 4

End = Literal["", "left", "failed"]

# What gloo, NCCL and torch say when a peer is gone; gloo names a file of its source.
WORDS_OF_COLLECTIVES = (
    *("gloo", "nccl", "closed by peer", "reset by peer"),
    *("timed out waiting", "caused pair closure", "watchdog caught"),
)


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
        self._board = _Board(group)
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
                innocence, sentence = _judge(before, after, last.time - first.time, self.step)
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


# The store


class _Board:
    """Keys of the group's store, one for each rank, through a connection of its own.

    Its own, because torch's may be busy, and because it stays when the group is destroyed. Besides
    there is a line on which nothing is ever said: it shows when the server is gone, before torch
    notices and prints pages about it, as it would at the end of every run in which rank 0, which
    holds the store, is first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        host, port = _address_of_store(group)
        self.is_gone = False
        self._place = _place_on_board(group)
        self._line = socket.create_connection((host, port), CONNECT_SECONDS)
        self._line.setblocking(False)
        timeout = timedelta(seconds=CONNECT_SECONDS)
        store_at = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store_at(host, port, wait_for_workers=False, timeout=timeout)
        self._store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))

    def write(self, rank: int, sign: Sign) -> None:
        self._assert_there()
        self._store.set(self._key(rank), json.dumps(asdict(sign)))

    def read(self, rank: int) -> Sign | None:
        self._assert_there()
        key = self._key(rank)
        return Sign(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def close(self) -> None:
        self.is_gone = True
        self._line.close()
        del self._store

    def _key(self, rank: int) -> str:
        return f"{self._place}/{rank}"

    def _assert_there(self) -> None:
        with suppress(BlockingIOError):
            if not self._line.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the store is gone")


def _address_of_store(group: dist.ProcessGroup) -> tuple[str, int]:
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        raise ValueError(f"ranks cannot meet at a {type(store).__name__}, which has no server")
    return store.host, store.port


_watches_made: Counter[str] = Counter()


def _place_on_board(group: dist.ProcessGroup) -> str:
    """Where the signs of this watch are: not where those of another are, or were before a restart.

    Torch's launcher keeps its server when it starts all ranks again, but gives their group another
    part of it. There whoever comes first says what to call the place.
    """
    _watches_made[group.group_name] += 1
    key = f"kfc/watch/{group.group_name}/{_watches_made[group.group_name]}"
    store = dist.distributed_c10d._get_process_group_store(group)
    return f"{key}/{store.compare_set(key, '', uuid.uuid4().hex).decode()}"


# Sentences


def _names_of_ranks(group: dist.ProcessGroup) -> list[str]:
    """Ranks as the group counts them; in a part of all processes, also as torch does."""
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(dist.get_world_size())):
        return [f"rank {rank}" for rank in ranks]
    return [f"rank {rank} (of all processes: {of_all})" for rank, of_all in enumerate(ranks)]


def _judge(
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
    errors = [cause for cause in _with_causes(error) if not isinstance(cause, SystemExit)]
    if not errors:
        return "left", ""
    first_line = str(errors[0]).partition("\n")[0]
    return "failed", f"{type(errors[0]).__name__}: {first_line}"


def is_of_collective(error: BaseException | None) -> bool:
    """Whether it, or what led to it, is what a collective raises if a peer is gone."""
    return any(map(_is_itself_of_collective, _with_causes(error)))


def _is_itself_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in WORDS_OF_COLLECTIVES)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
