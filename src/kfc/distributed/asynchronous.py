"""When inverses are refreshed: in the step, or asynchronously in a thread.

The thread works on copies of the factors, on the CPU; a later step applies its inverses. No step
uses inverses that were due more than ``max_staleness`` steps before.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from kfc._helpers import require_keys, require_whole
from kfc.curvature.damping import Damping
from kfc.curvature.kronecker import Inverse
from kfc.curvature.layer import Block
from kfc.curvature.model import ModelCurvature
from kfc.curvature.saved import as_if_trained, require_averages, require_damping, require_names
from kfc.distributed.options import Parallel
from kfc.distributed.reducer import Reducer


@dataclass(frozen=True)
class Job:
    """Inverses that the thread is computing.

    Attributes:
        begun: the step at which they were due.
        latest: the step that waits for them.
        blocks: the blocks they are computed from.
        share: the inverses that this rank computes.
    """

    begun: int
    latest: int
    blocks: dict[str, Block]
    share: Future[dict[str, Inverse]]


class InverseRefresher:
    """Refreshes the inverses of a curvature when they are due.

    Args:
        parallel: whether and how inverses are computed asynchronously.
        reducer: several ranks apply inverses at the same step.
    """

    def __init__(self, curvature: ModelCurvature, parallel: Parallel, reducer: Reducer) -> None:
        self._curvature = curvature
        self._max_staleness = parallel.max_staleness
        self._at_fixed_steps = parallel.deterministic or reducer.size > 1
        # The step at which the inverses in use were due; 0: there are none yet.
        self._refreshed_at = 0
        self._job: Job | None = None
        self._thread = _one_core_thread() if parallel.asynchronous else None

    def staleness(self, steps: int) -> int | None:
        """Return the age, in steps, of the inverses in use; ``None`` if there are none."""
        return steps - self._refreshed_at if self._refreshed_at else None

    def refresh(
        self,
        step: int,
        damping: Callable[[str], Damping],
        *,
        due: bool,
        period: int,
        at_once: bool = False,
    ) -> None:
        """Refresh what a step has to refresh; layers without an inverse get one immediately.

        Args:
            damping: returns δ of a layer's weight and bias, by its name.
            due: whether inverses are due at this step.
            period: the inverse period in force.
            at_once: refresh all inverses in this step.

        Raises:
            Exception: any error of the thread.
        """
        first = not self._refreshed_at
        if at_once or (due and (self._thread is None or first)):
            self._job = None
            self._curvature.refresh_inverses(damping, only_missing=False)
            self._refreshed_at = step
            return
        self._curvature.refresh_inverses(damping, only_missing=True)
        if first:
            self._refreshed_at = step
        self._apply_if_ready(step)
        if due and self._thread is not None and self._job is None:
            late = period if self._max_staleness is None else self._max_staleness
            self._begin(step, step + late, self._curvature.blocks(damping))
            self._apply_if_ready(step)

    def _begin(self, step: int, latest: int, blocks: Mapping[str, Block]) -> None:
        # Also the blocks that other ranks invert: the state dict contains them. Copied, because the
        # model's device may be the CPU.
        copies = {
            name: block._replace(
                running=tuple(tensor.detach().to("cpu", copy=True) for tensor in block.running)
            )
            for name, block in blocks.items()
        }
        assert self._thread is not None
        share = self._thread.submit(torch.no_grad()(self._curvature.invert), copies)
        self._job = Job(step, latest, copies, share)

    def _apply_if_ready(self, step: int) -> None:
        job = self._job
        if job is None:
            return
        if step >= job.latest or (job.share.done() and not self._at_fixed_steps):
            self._job = None
            self._curvature.adopt_inverses(job.blocks, job.share.result())
            self._refreshed_at = job.begun

    def raise_errors(self, step: int) -> None:
        """Raise the error of the thread, if its inverses would be applied in this step.

        This comes before anything in the step has changed. The next step does without them.
        """
        job = self._job
        if job is not None and (
            step >= job.latest or (job.share.done() and not self._at_fixed_steps)
        ):
            error = job.share.exception()
            if error is not None:
                self._job = None
                raise error

    def forget(self) -> None:
        """Start over after all inverses were dropped; a running job has no effect."""
        self._job, self._refreshed_at = None, 0

    def snapshot(self) -> tuple[int, Job | None]:
        """Return the state, to be passed to ``restore()``."""
        return self._refreshed_at, self._job

    def restore(self, snapshot: tuple[int, Job | None]) -> None:
        self._refreshed_at, self._job = snapshot

    def close(self) -> None:
        """End the thread after its current job."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the blocks that are being inverted, after waiting for the thread.

        The inverses are computed again after loading, so that all ranks save the same.
        """
        job = self._job
        blocks: dict[str, Any] = {}
        if job is not None:
            wait([job.share])  # a step reports its errors
            for name, block in job.blocks.items():
                running = [tensor.clone() for tensor in block.running]
                blocks[name] = {
                    "running": running,
                    "damping": block.damping._asdict(),
                    "roles": list(block.roles),
                }
        return {
            "refreshed_at": self._refreshed_at,
            "begun": job and job.begun,
            "latest": job and job.latest,
            "blocks": blocks,
        }

    def check_state(self, state: Mapping[str, Any], steps: int) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns.

        Args:
            steps: the number of completed steps in the same state.
        """
        what = "the inverse state's"
        require_keys("inverse state", state, ("refreshed_at", "begun", "latest", "blocks"))
        require_whole(f"{what} refreshed_at", state["refreshed_at"], low=0)
        require_keys("inverse state's blocks", state["blocks"], ())
        begun, latest, blocks = state["begun"], state["latest"], state["blocks"]
        if begun is None and (latest is not None or blocks):
            raise ValueError(f"{what} begun must not be None: there are blocks in progress")
        if begun is not None:
            require_whole(f"{what} begun", begun)
            require_whole(f"{what} latest", latest, low=begun)
        if max(state["refreshed_at"], begun or 0) > steps + 1:
            raise ValueError(
                f"{what} refreshed_at {state['refreshed_at']} and begun {begun} must be at most "
                f"{steps + 1} after {steps} steps"
            )
        for name, block in blocks.items():
            where = f"layer {name!r} in the inverse state's blocks"
            if name not in self._curvature.layers:
                raise ValueError(f"{where} does not exist here")
            layer = self._curvature.layers[name]
            require_keys(where, block, Block._fields)
            require_names(f"the roles of {where}", block["roles"], list(layer.layer.parameters()))
            if not block["roles"]:
                raise ValueError(f"the roles of {where} must not be empty")
            require_damping(where, block["damping"], may_be_unknown=False)
            with as_if_trained(layer, block["roles"]):
                require_averages(where, block["running"], layer.running_shapes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restart the saved job; without a thread, inverses are refreshed when next due."""
        self._job, self._refreshed_at = None, state["refreshed_at"]
        if state["begun"] is None or self._thread is None:
            return
        layers = self._curvature.layers
        blocks = {
            name: Block(
                tuple(tensor.to(layers[name].layer.dtype) for tensor in block["running"]),
                Damping(**block["damping"]),
                tuple(block["roles"]),
            )
            for name, block in state["blocks"].items()
            # A layer frozen or unfrozen since has no use for them.
            if name in layers and tuple(block["roles"]) == layers[name].trained_roles()
        }
        self._begin(state["begun"], state["latest"], blocks)


def _one_core_thread() -> ThreadPoolExecutor:
    """Return a thread that uses one core, and leaves the others to training."""

    def use_one_core() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # reading it gives the thread a number of its own

    thread = ThreadPoolExecutor(1, "kfc-inverses")
    before = torch.get_num_threads()
    thread.submit(use_one_core).result()
    # The number belongs to the thread, but later threads would also start with it.
    torch.set_num_threads(before)
    return thread
