"""A rank is killed or stopped, fails, or has fewer batches: the others end, and name it.

They say so in the error, if the collective that failed is ours; if it is one of DDP's, in the
user's backward, then in a line on stderr.
"""

import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.distributed import board, errors, signs, watch
from kfc.distributed.signs import Sign
from kfc.distributed.workers import Workers
from ranks import run_ranks, start_ranks

STEPS, FAULTY_STEP = 40, 12
# After the first, collectives give up; then ranks listen for three seconds.
GROUP_SECONDS, LIMIT_SECONDS = 4.0, 30.0

# What ranks do


def train(rank, optimizer_name, faulty_rank, fault):
    """A few steps, in the midst of which one rank does something else."""
    watch.BEAT_SECONDS = 0.1
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer, workers = make_optimizer(model, optimizer_name)
    for step in range(STEPS):
        if rank == faulty_rank and step == FAULTY_STEP:
            return fault()
        workers.at(step)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
        workers.sum([1.0])
        time.sleep(0.03)
    return "all steps"


def make_optimizer(model, name):
    if name == "kfc":
        optimizer = kfc.KFC(model, lr=0.01)
        return optimizer, optimizer.preconditioner.workers
    return torch.optim.SGD(model.parameters(), lr=0.01), Workers(dist.group.WORLD)


def send_signal(number):
    os.kill(os.getpid(), number)


def fail():
    raise ValueError("no more\nmemory")


def have_no_batches():
    return "some steps"


def sleep():
    time.sleep(60)


KILL, STOP = partial(send_signal, signal.SIGKILL), partial(send_signal, signal.SIGSTOP)

# What becomes of it


def explanations(cases):
    """What the ranks say that are not at fault, by case.

    All cases run at once: what ranks do after a fault is mostly to wait.
    """
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                start_ranks(train, size, *what, group_timeout=GROUP_SECONDS, store=store)
            )
            for name, (store, size, *what) in cases.items()
        }
        return {
            name: [explanation(outcome) for outcome in innocent(started[name], *case)]
            for name, case in cases.items()
        }


def innocent(ranks, _, size, __, faulty_rank, ___):
    others = [rank for rank in range(size) if rank != faulty_rank]
    outcomes = ranks.outcomes(LIMIT_SECONDS, of=others)
    return [outcomes[rank] for rank in others]


def explanation(outcome):
    """The one that a rank which ended by an error has given."""
    assert outcome.code == 1, str(outcome)
    pattern = rf"(?:^kfc: |WorkerError: )rank {outcome.rank} of \d: (.*)"
    found = re.findall(pattern, outcome.stderr, re.MULTILINE)
    assert len(found) == 1, outcome.stderr
    return found[0]


def assert_all_say(explanations, words):
    for said in explanations:
        assert re.fullmatch(words, said), said


# A rank may be ahead of its last sign; the optimizer counts from 1.
NEAR = f"step ({'|'.join(str(FAULTY_STEP + more) for more in range(-5, 2))})"
ALSO = f"( as this rank|, while this rank is at {NEAR})"
SILENT = rf"rank 1 has not been heard of for \d+ s, when it was at {NEAR}: it was killed or .*"
HOLDER = "rank 0, which holds the group's store,"


def test_ranks_that_lose_a_connection_name_who_is_gone():
    said = explanations(
        {
            "killed": ("launcher", 2, "kfc", 1, KILL),
            "killed, of three": ("rank 0", 3, "sgd", 1, KILL),
            "failed": ("launcher", 3, "kfc", 1, fail),
            "left": ("rank 0", 2, "kfc", 1, have_no_batches),
            "holder killed": ("rank 0", 2, "kfc", 0, KILL),
        }
    )
    assert_all_say(said["killed"] + said["killed, of three"], SILENT)
    assert_all_say(said["failed"], f"rank 1 failed at {NEAR}: ValueError: no more")
    assert_all_say(
        said["left"], f"rank 1 left at {NEAR}{ALSO}: it ended, perhaps with fewer batches"
    )
    assert_all_say(said["holder killed"], f"{HOLDER} is gone: it ended .*, or was killed")


def test_ranks_that_wait_in_vain_name_whom_they_wait_for():
    said = explanations(
        {
            "stopped": ("launcher", 2, "kfc", 1, STOP),
            "stopped, of three": ("rank 0", 3, "sgd", 1, STOP),
            "sleeps": ("rank 0", 3, "kfc", 1, sleep),
            "waits": ("launcher", 2, "sgd", 1, dist.barrier),
            "holder stopped": ("rank 0", 2, "kfc", 0, STOP),
        }
    )
    assert_all_say(said["stopped"] + said["stopped, of three"], SILENT)
    where = f"at {NEAR}{ALSO}"
    assert_all_say(said["sleeps"], f"rank 1 is alive, {where}: it waits elsewhere, or is slow")
    both = "(is alive|failed in the same way)"
    assert_all_say(said["waits"], f"rank 1 {both}, {where}: .*")
    assert_all_say(said["holder stopped"], f"{HOLDER} does not answer: it was stopped, .*")


# Where nothing is wrong


def end_before_others(rank):
    workers = Workers(dist.group.WORLD)
    workers.sum([1.0])
    if rank != 0:
        # Long enough for signs of life to a store that is gone.
        time.sleep(4 * watch.BEAT_SECONDS)


def test_nobody_complains_if_the_holder_of_the_store_is_first_to_end():
    with start_ranks(end_before_others, 2, store="rank 0") as ranks:
        outcomes = ranks.outcomes(LIMIT_SECONDS)
    assert [(outcome.code, outcome.stderr) for outcome in outcomes] == [(0, "")] * 2


def test_one_process_is_not_watched():
    alone = Workers(None)
    alone.at(1)
    alone.close()
    assert alone.watch is None


# Parts


def watch_closely(rank):
    """What watches say of each other in some special cases; three ranks."""
    said = {}
    with patch.object(watch, "LISTEN_SECONDS", 1.0):
        first, second = (Workers(dist.group.WORLD) for _ in range(2))
        said["threads"] = sum(t.name == "kfc-watch" for t in threading.enumerate())
        for step in range(1000):
            second.at(step)
        if rank == 1:
            second.watch.leave("it has had enough")
            second.close()
        dist.barrier()
        if rank != 1:
            said["reason"] = second.watch.explain()
            said["one of them"] = second.watch.suffers and not first.watch.suffers
        pair = dist.new_group([1, 2])
        if rank == 2:
            said["not begun"] = watch.Watch(pair).explain()
        said["fork"] = explain_in_fork(first.watch)
        dist.barrier()
        dist.destroy_process_group()
        said["destroyed"] = first.watch.explain()
    return said


def explain_in_fork(watched):
    """Where there is no thread to ask."""
    read, write = os.pipe()
    if os.fork() == 0:
        watched.at(1)
        watched.close()
        os.write(write, watched.explain().encode())
        os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()


def test_watches_in_special_cases():
    said = run_ranks(watch_closely, 3)
    for one in said:
        assert one["threads"] == 1
        assert one["fork"] == "this rank had left the others"
        assert one["destroyed"].startswith("rank ")
    for one in (said[0], said[2]):
        assert one["reason"] == "rank 1 left at step 999 as this rank: it has had enough"
        assert one["one of them"]
    assert said[2]["not begun"] == "rank 0 (of all processes: 1) has not begun to train"


def watch_through_file(rank, path):
    """Such a store has no server; beats would make the file grow for ever."""
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    workers = Workers(dist.group.WORLD)
    workers.at(1)
    return workers.watch is None and workers.sum([1.0]) == [2.0]


def test_a_group_that_meets_at_a_file_is_not_watched(tmp_path):
    assert run_ranks(watch_through_file, 2, str(tmp_path / "store")) == [True, True]


def judge(after, *, before=None, seconds=3.0, own_step=5):
    return signs.judge(before or after, after, seconds, own_step)


def test_what_is_said_of_a_rank():
    now = time.time()
    assert judge(None) == (0, "has not begun to train")
    _, silent = judge(Sign(beat=3, clock=now - 60))
    assert silent.startswith("has not been heard of for 60 s, when it was before its first step")
    # Too short to tell, and beats in between.
    alive = "is alive, at step 5 as this rank: it waits elsewhere, or is slow"
    assert judge(Sign(beat=3, step=5, clock=now), seconds=1.0) == (2, alive)
    assert judge(Sign(beat=4, step=5), before=Sign(beat=3)) == (2, alive)
    # Who suffers is innocent, whatever else.
    suffers = Sign(step=5, suffers=True, end="failed", reason="RuntimeError: gloo")
    assert judge(suffers)[0] > 2


def chained(error, cause):
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("left", "")),
        (SystemExit(1), ("left", "")),
        (ValueError("a\nb"), ("failed", "ValueError: a")),
        (chained(SystemExit(1), KeyError("k")), ("failed", "KeyError: 'k'")),
    ],
)
def test_how_a_process_ends(error, expected):
    assert watch._end_by(error) == expected


def test_errors_of_collectives_are_known():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5")
    late = RuntimeError("Timed out waiting 2000ms for recv operation to complete")
    for error in (lost, late, chained(SystemExit(1), lost), dist.DistBackendError("x")):
        assert errors.is_of_collective(error)
    for error in (None, RuntimeError("shapes differ"), ValueError("timeout must be positive")):
        assert not errors.is_of_collective(error)


def test_the_error_that_ends_a_process_is_found(monkeypatch):
    """After the interpreter has printed it, or while multiprocessing handles it."""
    error = ValueError("x")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    assert watch._uncaught_error() is error
    found = None
    with suppress(KeyError):
        try:
            raise KeyError
        finally:
            found = watch._uncaught_error()
    assert isinstance(found, KeyError)


def places_on_boards(rank):
    """Of two watches of one group, and of one after a restart, whose group has another store."""
    first, second = (board.place_on_board(dist.group.WORLD) for _ in range(2))
    store = dist.PrefixStore("restarted", dist.distributed_c10d._get_default_store())
    board._watches_made.clear()
    with patch.object(dist.distributed_c10d, "_get_process_group_store", return_value=store):
        return first, second, board.place_on_board(dist.group.WORLD)


def test_signs_of_a_restart_have_another_place():
    first, second = run_ranks(places_on_boards, 2)
    assert first == second
    assert len(set(first)) == 3
