"""The curvature of a model, kept up to date: statistics, inverses, natural gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfc.budget import longest
from kfc.buffers import SavedBuffers
from kfc.capture import Capture
from kfc.checks import (
    all_finite,
    largest_entries,
    moved,
    require_choice,
    require_keys,
    require_number,
    require_whole,
)
from kfc.curvature import Curvature
from kfc.description import describe_layers
from kfc.distributed import join_workers
from kfc.distributed.inverter import Inverter
from kfc.distributed.placement import PLACEMENTS, PlacementKind, place, size_of
from kfc.distributed.sharding import refuse_sharded, refuse_sharding_wrapper
from kfc.distributed.workers import GroupChoice, refuse_later_group
from kfc.fisher import Output
from kfc.gathering import FISHER_KINDS, FisherKind, Gathering
from kfc.kronecker import INVERSES, Factors
from kfc.layers import KroneckerHandler, NormalisationHandler, plan_layers
from kfc.layers.base import DEFAULT_MAX_FACTOR_SIZE
from kfc.layers.structures import STRUCTURES
from kfc.likelihoods import Likelihood, resolve_likelihood
from kfc.periods import Period, is_due, require_period
from kfc.randomness import accelerators_of, forked_random_state
from kfc.renewal import INVERSE_WORKERS, NOTHING_IN_THE_MAKING, InverseWorkerKind, Renewal
from kfc.schedule import DEFAULT_INVERSE_PERIOD, Schedule
from kfc.session import without_autocast
from kfc.skipping import SkippedSteps, named_ranks
from kfc.teamwork import describe_ranks, require_equal_ranks

InverseKind = Literal["factored", "eigen"]
CurvatureKind = Literal["kfc", "sua", "prong", "diagonal", "ekfac"]

STATE_KEYS = ("steps", "skipped_steps", "generator", "budget", "curvature")

# When the same thing goes wrong so often in a row, on several ranks, it will not go right again.
MOST_SKIPPED_IN_A_ROW = 10


class Preconditioner:
    """KFC's approximation of the Fisher matrix, for use with any optimizer.

    >>> preconditioner = kfc.Preconditioner(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    >>> for images, labels in loader:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(images), labels).backward()
    ...     preconditioner.step()  # gradients become natural gradients, in place
    ...     optimizer.step()

    Args:
        model: the network. Statistics are gathered by hooks whenever it runs in training mode.
        damping: δ, added to the curvature (λ + γ in the paper).
        statistics_period: T_s, gather statistics every so many steps: a number or a
            :class:`kfc.Stretch`; by default ``Stretch(10)``.
        inverse_period: T_f, likewise for inverses; by default ``Stretch(20)``.
        overhead: instead of periods, what they may add to the time of a step: 0.25 for a quarter.
            The first steps are measured, and the periods that are not given follow.
        factor_decay: ξ, the weight of the old value in the factors' moving averages.
        max_factor_size: factors wider than this keep their diagonal only.
        likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or a :class:`kfc.Likelihood`.
        fisher: ``"sampled"`` targets (one draw), the ``"exact"`` expectation over them, or
            ``"empirical"``, the targets of the data, seen in your own backward pass.
        inverse: ``"factored"`` damping of each factor (Cholesky), or ``"eigen"``: exact damping.
        curvature: how the Fisher blocks of linear and convolutional layers are approximated:
            ``"kfc"``; ``"sua"``, as if activations at distinct locations were uncorrelated;
            ``"prong"``, as if derivatives were white besides; ``"diagonal"``, the exact block's
            diagonal; ``"ekfac"``, second moments of gradients in the eigenbasis of KFC's factors.
            The last two have no factors to damp, whatever ``inverse`` says: δ is added to their
            entries exactly.
        output: picks the tensor of outputs from what the model returns, if that is not a tensor.
        seed: of the generator that draws targets; by default torch's initial seed. The global
            generator is left alone.
        process_group: the ranks that train the model together, each on its part of the batch; by
            default that of ``DistributedDataParallel``, if the model is wrapped in it, or torch's
            default group, if there is one. ``None``: this process alone.
        inverse_placement: of several ranks, which computes inverses: ``"shared"``, each some of
            them, which it sends to the others; ``"replicated"``, each all of them;
            ``"gradients"``, each some of them, which it keeps, sending natural gradients instead;
            ``"auto"``: for each layer whichever costs least.
        inverse_worker: ``"thread"`` computes inverses beside training, on the CPU, and a later step
            takes them up; ``None``: in the step.
        max_staleness: with a worker, how many steps after they were due inverses may still be in
            the making; then the step waits. By default the inverse period in force then.
        deterministic: with a worker, take inverses up just ``max_staleness`` steps after they were
            due, not before. Several ranks do so in any case: they must do it together.
        consistency_period: of several ranks, check every so many steps that all have the same
            parameters, factors and inverses, bit for bit. ``None``: only that parameters and
            gradients are the same in the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = 1e-3,
        statistics_period: Period | None = None,
        inverse_period: Period | None = None,
        overhead: float | None = None,
        factor_decay: float = 0.95,
        max_factor_size: int = DEFAULT_MAX_FACTOR_SIZE,
        likelihood: str | Likelihood = "categorical",
        fisher: FisherKind = "sampled",
        inverse: InverseKind = "factored",
        curvature: CurvatureKind = "kfc",
        output: Output | None = None,
        seed: int | None = None,
        process_group: GroupChoice = "auto",
        inverse_placement: PlacementKind = "auto",
        inverse_worker: InverseWorkerKind | None = None,
        max_staleness: int | None = None,
        deterministic: bool = False,
        consistency_period: int | None = None,
    ) -> None:
        if statistics_period is not None:
            require_period("statistics_period", statistics_period)
        if inverse_period is not None:
            require_period("inverse_period", inverse_period)
        if overhead is not None:
            require_number("overhead", overhead, positive=True)
        require_period("max_factor_size", max_factor_size)
        require_number("damping", damping)
        require_number("factor_decay", factor_decay, below=1)
        if seed is not None:
            require_whole("seed", seed, low=None)
        require_choice("fisher", fisher, FISHER_KINDS)
        require_choice("inverse", inverse, tuple(INVERSES))
        require_choice("curvature", curvature, tuple(STRUCTURES))
        require_choice("inverse_placement", inverse_placement, PLACEMENTS)
        require_choice("inverse_worker", inverse_worker, INVERSE_WORKERS)
        if max_staleness is not None:
            require_whole("max_staleness", max_staleness, low=0)
        if consistency_period is not None:
            require_whole("consistency_period", consistency_period)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if next(model.parameters(), None) is None:
            raise ValueError("the model has no parameters to train")
        refuse_sharding_wrapper(model)
        refuse_sharded(model.named_parameters())
        model, self.workers = join_workers(model, process_group)
        self.model = model
        self.damping = damping
        device = next(model.parameters()).device
        self.schedule = Schedule(statistics_period, inverse_period, overhead, device, self.workers)
        self.factor_decay = factor_decay
        self.plan = plan_layers(model, max_factor_size, curvature)
        sizes = {name: size_of(handler, inverse) for name, handler in self.plan.handlers.items()}
        serves = longest(inverse_period or DEFAULT_INVERSE_PERIOD)
        placements = place(sizes, self.workers.size, inverse_placement, serves)
        inverter = Inverter(self.plan.handlers, inverse, self.workers, placements)
        self.curvature = Curvature(self.plan, inverter)
        self.renewal = Renewal(
            self.curvature,
            inverse_worker,
            max_staleness,
            at_fixed_steps=deterministic or self.workers.size > 1,
        )
        self.gathering = Gathering(
            model,
            self.curvature,
            resolve_likelihood(likelihood),
            fisher,
            output,
            self.workers.share(torch.initial_seed() if seed is None else seed),
            self.workers,
        )
        self.consistency_period = consistency_period
        self._process_group = process_group
        self.steps = 0
        self._skipped_in_a_row = 0
        # Here, or since a state was loaded.
        self._is_first = True
        self.skipped_steps = SkippedSteps()
        # Whether the step in progress is bad, if only the device knows; and if so, without warning.
        self.in_doubt: Tensor | None = None
        self._quietly: Tensor | None = None
        self.gathering.clock_device = self.schedule.clock_device
        self._capture = Capture(
            model, self.plan.handlers, self.gathering, during_backward=fisher == "empirical"
        )

    # What a user of the curvature on its own calls

    @torch.no_grad()
    def step(self, loss_scale: float = 1.0) -> bool:
        """Replace the gradients by natural gradients, in place, after ``loss.backward()``.

        Args:
            loss_scale: what the loss was multiplied by before its backward, if the gradients have
                been unscaled since (``GradScaler.unscale_``); only ``fisher="empirical"`` asks.

        Returns:
            False if the batch gave something that is not finite: the gradients are then removed,
            so that the optimizer's own step leaves the parameters alone.
        """
        gradients = self.gradients()
        if not self.begin_step(gradients, lambda _: self.damping, loss_scale, wait=True):
            self.model.zero_grad(set_to_none=True)
            return False
        self.precondition(gradients)
        self.end_step()
        return True

    @property
    def factors(self) -> dict[str, Factors]:
        """Ω and Γ of every Kronecker-factored layer by name, once there are statistics.

        ``.activation`` and ``.derivative`` are (n, n), or (groups, n, n) for several groups. A
        factor wider than ``max_factor_size`` is its diagonal, one dimension less; so is Γ = c I
        with ``curvature="prong"``. With ``"diagonal"`` there are no factors, and no layer is here.
        """
        found = {}
        for name, running in self.curvature.running():
            handler = self.plan.handlers[name]
            factors = handler.factors(running) if isinstance(handler, KroneckerHandler) else None
            if factors is not None:
                found[name] = Factors(*(f.squeeze(0) if f.shape[0] == 1 else f for f in factors))
        return found

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The Fisher blocks of every normalisation layer by name, (channels, 2, 2)."""
        return {
            name: running[0]
            for name, running in self.curvature.running()
            if isinstance(self.plan.handlers[name], NormalisationHandler)
        }

    def estimate_factors(
        self, batches: Iterable[Any], progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """Set the factors from many batches, as Algorithm 1 begins (eqn 22).

        Args:
            batches: each item is the model's input, or a tuple or list whose first element is.
            progress: called after each batch with the number done and, if known, of all.

        Parameters, gradients, buffers and the random state stay as they were.
        """
        if self.gathering.fisher == "empirical":
            raise ValueError(
                'estimate_factors draws targets from the model; with fisher="empirical" the first '
                "steps' own backward passes give the factors"
            )
        if not self.model.training:
            raise RuntimeError(
                "no statistics are gathered in evaluation mode; call model.train() before "
                "estimate_factors"
            )
        with self._estimation(), forked_random_state(accelerators_of(self.model)):
            done, total, bad = 0, _length(batches), -1
            for done, batch in enumerate(batches, start=1):
                with torch.enable_grad():
                    self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)
                if not bool(all_finite(self.curvature.pending_traces())):
                    bad = done - 1
                    break
                if progress is not None:
                    progress(done, total)
            self._refuse_estimate(done, bad)
            self.gathering.complete()
            self.gathering.align_generators()
            self.curvature.replace_by_pending()
            self.renewal.drop()

    def _refuse_estimate(self, done: int, bad: int) -> None:
        """Raise, on all ranks alike, if one had a bad batch (-1: none), or all had no batches."""
        by_rank = self.workers.gather([float(done), float(bad)])
        for rank, (_, batch) in enumerate(by_rank):
            if batch >= 0:
                where = f" of rank {rank}" if self.workers.size > 1 else ""
                raise ValueError(f"batch {batch:.0f}{where} gave statistics that are not finite")
        if not any(count for count, _ in by_rank):
            raise ValueError("estimate_factors was given no batches")

    def describe(self) -> str:
        """Print, and return, how every parameter is treated, and why."""
        text = describe_layers(self.model, self.plan, self.curvature.inverse_kind)
        print(text)
        return text

    def close(self) -> None:
        """Remove every hook from the model, and end the worker; the factors stay readable."""
        self._capture.close()
        self.renewal.close()
        self.workers.close()

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Counters, seconds by part and numbers for every layer.

        ``seconds`` are of the last time a part was done, ``total_seconds`` since this was made.
        """
        layers = {
            name: {
                **self.plan.handlers[name].summary(running),
                "damping": self.curvature.layers[name].damping,
            }
            for name, running in self.curvature.running()
        }
        return {
            "step": self.steps,
            "skipped_steps": self.skipped_steps.count(),
            "seconds": {"statistics": self.gathering.seconds, **self.schedule.seconds},
            "total_seconds": {
                "statistics": self.gathering.total_seconds,
                **self.schedule.total_seconds,
            },
            "periods": self.schedule.describe(self.steps + 1),
            "staleness": self.steps - self.renewal.made_at if self.renewal.made_at else None,
            "ranks": describe_ranks(self.curvature),
            "layers": layers,
        }

    # What optimizers built on it call: gradients, begin_step, precondition, end_step

    def gradients(self) -> dict[str, Tensor]:
        """By name; parameters that are frozen or have no gradient are left alone."""
        found: dict[str, Tensor] = {}
        refuse_sharded(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None or not parameter.requires_grad:
                continue
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse; build its layer with sparse=False"
                )
            found[name] = parameter.grad
        return found

    def begin_step(
        self,
        gradients: Mapping[str, Tensor],
        damping: Callable[[str], float],
        loss_scale: float | Tensor = 1.0,
        overflow: Tensor | None = None,
        *,
        wait: bool = False,
        renew: bool = False,
    ) -> bool:
        """Take up the batch's statistics and renew the inverses that are due.

        If neither is due, and unless told to ``wait``, the device is not waited for; whether the
        gradients are finite is then in ``in_doubt``.

        Args:
            gradients: by parameter name.
            damping: δ of a layer, by its name.
            loss_scale: what the loss was multiplied by; asked for by the empirical Fisher only.
            overflow: whether the caller found the batch bad, to be skipped without a warning.
            renew: whether the inverses are wanted new even if they are not due.

        Returns:
            False, with nothing changed but the count of skipped steps, if the batch is known to
            have given a gradient or a statistic that is not finite.
        """
        if not self._capture.close.alive:
            raise RuntimeError("the optimizer is closed: its hooks are gone; make a new one")
        self._forget_doubts()
        with self._full_precision():
            self.gathering.complete(loss_scale)
            if self.steps == 0:
                self._refuse_without_statistics(gradients)
            self.schedule.begin_measuring(self.gathering.started, self.gathering.spent)
            self._compare_ranks(gradients)
            if not self._check(gradients, overflow, wait):
                return False
            with self.schedule.timed("averages"):
                self.curvature.take_up(self.factor_decay)
            with self.schedule.timed("inverses"):
                self.renewal.renew(
                    self.steps + 1,
                    damping,
                    due=self._inverses_are_due(),
                    period=self.schedule.length("inverse", self.steps + 1),
                    at_once=renew,
                )
        return True

    def _compare_ranks(self, gradients: Mapping[str, Tensor]) -> None:
        """In the first step of all, and when asked for: whether all ranks have the same."""
        period, step = self.consistency_period, self.steps + 1
        if self._is_first:
            refuse_later_group(self.workers, self._process_group)
        if self.workers.size > 1 and (self._is_first or (period and is_due(period, step))):
            require_equal_ranks(self.model, self.curvature, gradients, step)
        self._is_first = False

    def _inverses_are_due(self) -> bool:
        return self.schedule.inverses_are_due(self.steps + 1)

    def _check(self, gradients: Mapping[str, Tensor], overflow: Tensor | None, wait: bool) -> bool:
        """Whether the batch may be used, as far as that is known."""
        with self.schedule.timed("check"):
            traces = self.curvature.pending_traces()
            bad = ~all_finite([*largest_entries(gradients.values()), *traces])
            if overflow is not None:
                bad = bad | moved(overflow, bad.device)
            due = bool(traces) or self._inverses_are_due() or self.curvature.lacks_inverses()
            if not (wait or due):
                self.doubt(bad, overflow)
                return True
            if not bad.item():
                return True
        self.skip_step(quietly=overflow is not None and bool(overflow))
        return False

    def precondition(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace vectors v by F̂_damped⁻¹ v (eqn 10), in place, by parameter name.

        Where there is no handler, v stays.

        Returns:
            Each parameter's part of vᵀ F̂_damped⁻¹ v, a scalar.
        """
        with self.schedule.timed("natural gradient"), self._full_precision():
            return self.curvature.precondition(vectors)

    def doubt(self, bad: Tensor, quietly: Tensor | None = None) -> None:
        """The step in progress is bad if the device says so; ``in_doubt`` tells."""
        before = self.in_doubt
        self.in_doubt = bad if before is None else before | moved(bad, before.device)
        self._quietly = quietly if quietly is not None else self._quietly

    def end_step(self) -> None:
        self._skipped_in_a_row = 0
        if self.in_doubt is not None:
            self.skipped_steps.add_on_device(self.in_doubt, self._quietly)
        self.schedule.end_measuring(self.steps + 1, self.gathering.spent)
        self.gathering.clock_device = self.schedule.clock_device
        self._forget_batch()
        self._be_at(self.steps + 1)

    def _be_at(self, steps: int) -> None:
        self.steps = steps
        self.gathering.step = steps + 1
        self.gathering.due = self.schedule.statistics_are_due(steps + 1)

    def skip_step(self, *, quietly: bool = False) -> None:
        """Drop the batch's statistics, and count; what was due stays due."""
        ranks = []
        if self.workers.size > 1 and not quietly:
            ranks = self.gathering.find_bad_ranks()
            self._skipped_in_a_row += 1
        self._forget_batch()
        self.skipped_steps.add(self.steps + 1, ranks, quietly=quietly)
        if self._skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            # The other ranks' users see nothing wrong, and would go on for ever.
            raise FloatingPointError(
                f"step {self.steps + 1} was skipped {self._skipped_in_a_row} times: "
                f"{named_ranks(ranks)} gave something that is not finite. The parameters are as "
                "they were; look at the batch and the loss there"
            )

    def _forget_batch(self) -> None:
        self.gathering.drop()
        self._forget_doubts()

    def _forget_doubts(self) -> None:
        """Also those that an exception in the last step left behind."""
        self.in_doubt = self._quietly = None
        self.schedule.forget()

    def _full_precision(self) -> torch.autocast:
        return without_autocast(next(self.model.parameters()).device)

    def _refuse_without_statistics(self, gradients: Mapping[str, Tensor]) -> None:
        known = self.curvature.pending or any(self.curvature.running())
        covered = any(name in self.plan.layer_of for name in gradients)
        if not known and (covered or not gradients):
            raise RuntimeError(
                "step() before any forward pass in training mode: there are no statistics yet. "
                "Call model.train(), run the model and loss.backward() first, and call the model "
                "itself, not its parts"
            )

    @contextmanager
    def _estimation(self) -> Iterator[None]:
        """Gather from every forward pass, of nothing before; buffers stay as they were."""
        buffers = SavedBuffers(self.model)
        self.gathering.drop()
        self.gathering.due = self.gathering.estimating = True
        try:
            yield
        finally:
            self.gathering.drop()
            self.gathering.estimating = False
            self._be_at(self.steps)
            buffers.restore()

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bit for bit; call it between steps.

        But for inverses that one of several ranks keeps for itself: they are made anew.
        """
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps.count(),
            "generator": self.gathering.generator.state_dict(),
            "budget": self.schedule.state_dict(),
            "curvature": self.curvature.state_dict(),
            "renewal": self.renewal.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error that says why if the state cannot be loaded here; change nothing."""
        require_keys("preconditioner state", state, STATE_KEYS)
        for counter in ("steps", "skipped_steps"):
            require_whole(f"the state's {counter}", state[counter], low=0)
        Schedule.check_state(state["budget"])
        self.gathering.generator.check_state(state["generator"])
        self.curvature.check_state(state["curvature"])
        Renewal.check_state(state.get("renewal", NOTHING_IN_THE_MAKING))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the model's own parameters are loaded separately."""
        self.check_state(state)
        self.skipped_steps.restore(state["skipped_steps"])
        self._forget_batch()
        self.gathering.generator.load_state_dict(state["generator"])
        self.schedule.load_state_dict(state["budget"])
        self.gathering.clock_device = self.schedule.clock_device
        self._be_at(state["steps"])
        self.curvature.load_state_dict(state["curvature"])
        self.renewal.load_state_dict(state.get("renewal", NOTHING_IN_THE_MAKING))
        self._is_first = True


def _length(batches: Iterable[Any]) -> int | None:
    """How many there are, if they say so; a loader over a stream has a length that raises."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None
