"""When inverses are renewed: at once, or beside training (appendix A.3), by a thread.

The thread works on copies of the factors, on the CPU whatever the model is on; what it has made is
taken up at a later step. No step goes by with inverses that were due more than ``max_staleness``
steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kfc.checks import require_keys, require_whole
from kfc.curvature import Block, Curvature
from kfc.layers.base import Inverse

InverseWorkerKind = Literal["thread"]
INVERSE_WORKERS = (None, "thread")

# The state of one without a job; and of all, before there were workers.
NOTHING_IN_THE_MAKING: Mapping[str, Any] = {
    "made_at": 0,
    "begun": None,
    "latest": None,
    "blocks": {},
}


@dataclass
class Job:
    """Inverses in the making.

    Attributes:
        begun: the step at which they were due.
        latest: the step that waits for them.
        blocks: what they are made of.
        share: those that this rank makes.
    """

    begun: int
    latest: int
    blocks: dict[str, Block]
    share: Future[dict[str, Inverse]]


class Renewal:
    """Renews the inverses of a curvature when they are due.

    Args:
        worker: "thread" for inverses beside training; ``None``: in the step.
        max_staleness: how many steps after they were due inverses may still be in the making; then
            the step waits for them. ``None``: as many as lie between two renewals at that time.
        at_fixed_steps: whether inverses are taken up just then and not before, so that it makes no
            difference how fast the thread is.

    Attributes:
        made_at: at which step the inverses in use were due; 0 if there are none yet.
    """

    def __init__(
        self,
        curvature: Curvature,
        worker: InverseWorkerKind | None,
        max_staleness: int | None,
        *,
        at_fixed_steps: bool,
    ) -> None:
        self.curvature = curvature
        self.max_staleness = max_staleness
        self.at_fixed_steps = at_fixed_steps
        self.made_at = 0
        self._job: Job | None = None
        self._thread: ThreadPoolExecutor | None = None
        if worker == "thread":
            self._thread = _one_core_thread()

    def renew(
        self,
        step: int,
        damping: Callable[[str], float],
        *,
        due: bool,
        period: int,
        at_once: bool = False,
    ) -> None:
        """What a step does about inverses; layers without any get theirs at once.

        Args:
            damping: δ of a layer, by its name.
            period: in force at this step.
            at_once: whether all are wanted new in this step.

        Raises:
            Exception: whatever went wrong in the thread.
        """
        if at_once or (due and (self._thread is None or not self.made_at)):
            self.drop()
            self.curvature.refresh_inverses(damping, only_missing=False)
            self.made_at = step
            return
        self.curvature.refresh_inverses(damping, only_missing=True)
        self._take_if_time(step)
        if due and self._job is None:
            late = period if self.max_staleness is None else self.max_staleness
            self._begin(step, step + late, self.curvature.blocks_to_invert(damping))
            self._take_if_time(step)

    def _begin(self, step: int, latest: int, blocks: Mapping[str, Block]) -> None:
        # All of them, also those that other ranks invert: a state dict must have them.
        copies = {name: _copied(block) for name, block in blocks.items()}
        assert self._thread is not None
        share = self._thread.submit(_invert, self.curvature, copies)
        self._job = Job(step, latest, copies, share)

    def _take_if_time(self, step: int) -> None:
        job = self._job
        if job is None:
            return
        if step >= job.latest or (job.share.done() and not self.at_fixed_steps):
            self._job = None
            self.curvature.take_inverses(job.blocks, job.share.result())
            self.made_at = job.begun

    def drop(self) -> None:
        """Forget what is in the making; the thread goes on with its copies, to no effect."""
        self._job = None

    def snapshot(self) -> tuple[int, Job | None]:
        """What an error must leave as it was."""
        return self.made_at, self._job

    def restore(self, entry: tuple[int, Job | None]) -> None:
        self.made_at, self._job = entry

    def close(self) -> None:
        """End the thread, when it has done what it is at."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Waits for what is in the making. All ranks have the same: of what, not what becomes."""
        job = self._job
        if job is None:
            return {**NOTHING_IN_THE_MAKING, "made_at": self.made_at}
        wait([job.share])  # whether it went well is for a step to say
        blocks = {
            name: {
                "running": [tensor.clone() for tensor in block.running],
                "damping": block.damping,
                "roles": list(block.roles),
            }
            for name, block in job.blocks.items()
        }
        return {
            "made_at": self.made_at,
            "begun": job.begun,
            "latest": job.latest,
            "blocks": blocks,
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if it is not what ``state_dict`` gives."""
        require_keys("renewal state", state, ("made_at", "begun", "latest", "blocks"))
        require_whole("the renewal state's made_at", state["made_at"], low=0)
        for name in ("begun", "latest"):
            if state["begun"] is not None:
                require_whole(f"the renewal state's {name}", state[name])
        for name, block in state["blocks"].items():
            require_keys(f"renewal state of layer {name!r}", block, Block._fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin again what was in the making; without a thread, the next time they are due."""
        self.drop()
        self.made_at = state["made_at"]
        if state["begun"] is None or self._thread is None:
            return
        handlers = self.curvature.handlers
        blocks = {
            name: Block(
                tuple(tensor.to(handlers[name].dtype) for tensor in block["running"]),
                block["damping"],
                tuple(block["roles"]),
            )
            for name, block in state["blocks"].items()
            # Of a layer frozen or thawed since, the statistics have no use.
            if name in handlers and tuple(block["roles"]) == tuple(handlers[name].trained())
        }
        self._begin(state["begun"], state["latest"], blocks)


def _one_core_thread() -> ThreadPoolExecutor:
    """A thread that leaves the other cores to training."""
    thread = ThreadPoolExecutor(1, "kfc-inverses")
    before = torch.get_num_threads()
    thread.submit(_keep_to_one_core).result()
    # The number is the thread's own, but also what threads to come would begin with.
    torch.set_num_threads(before)
    return thread


def _keep_to_one_core() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # by asking, the thread comes to have a number of its own


def _copied(block: Block) -> Block:
    """On the CPU; the averages themselves go on changing."""
    running = tuple(tensor.detach().to("cpu", copy=True) for tensor in block.running)
    return block._replace(running=running)


@torch.no_grad()
def _invert(curvature: Curvature, blocks: Mapping[str, Block]) -> dict[str, Inverse]:
    return curvature.invert(blocks)
