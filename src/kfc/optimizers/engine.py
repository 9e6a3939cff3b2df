"""The curvature of a model, kept up to date from step to step."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import (
    all_finite,
    are_finite,
    finite_scalars,
    is_asynchronous,
    moved,
)
from kfc.curvature.damping import Damping
from kfc.curvature.model import ModelCurvature
from kfc.curvature.options import Approximation
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.asynchronous import InverseRefresher
from kfc.distributed.options import Parallel
from kfc.distributed.ranked import make_reducer
from kfc.distributed.ranks import CollectiveError
from kfc.fisher.calls import without_autocast
from kfc.fisher.compiled import eager_module
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.fisher.losses import Losses
from kfc.layers import Plan, find_layers
from kfc.optimizers.allowance import INVERSES, STATISTICS, Allowance
from kfc.optimizers.checks import check_model, check_options, described
from kfc.optimizers.divergence import Divergence
from kfc.optimizers.engine_state import EngineState
from kfc.optimizers.fallback import Fallback
from kfc.optimizers.groups import excluded_layers
from kfc.optimizers.members import Members
from kfc.optimizers.options import FisherClip
from kfc.optimizers.skipping import SkippedSteps, cause
from kfc.optimizers.startup import log_start
from kfc.optimizers.steps import Scalar
from kfc.optimizers.work import work_of
from kfc.schedule import Budget, Periods, Schedule, longest
from kfc.statistics.collector import Collector
from kfc.statistics.hooks import ModelHooks


class Engine(EngineState):
    """Statistics, inverses and natural gradients of one model.

    A step calls, in this order, ``begin_step()``, ``update_()``, ``refresh_inverses()``,
    ``solve_()`` and ``end_step()``, or ``skip_step()`` instead of the rest.

    Args:
        clip: how often exact Fisher norms are computed, and on how many examples.
        averaging_timescale: τ of the averaged parameters, which may determine ξ.
        groups: the overrides of param groups, which may exclude layers.

    The other arguments are those of ``kfc.Preconditioner``.

    Attributes:
        model: the model without the wrappers of DDP and ``torch.compile``.
        members: the parameters of the model.
        fallback: the layers that have lost their curvature for want of statistics.
        steps: the number of completed steps.
        in_doubt: a boolean scalar on the device that is true if the step in progress is bad;
            ``None`` if the step is known to be good.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: LikelihoodChoice,
        output: Output | None,
        strict: bool,
        seed: int | None,
        curvature: Approximation,
        schedule: Periods | Budget,
        parallel: Parallel | None,
        clip: FisherClip | None = None,
        averaging_timescale: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        options = curvature.with_decay(averaging_timescale)
        check_model(model)
        check_options(seed, options, schedule, parallel)
        parallel = parallel or Parallel()
        quiet = not options.needs_derivatives
        losses = Losses(likelihood, output, strict=strict, quiet=quiet)
        model, self.reducer = make_reducer(eager_module(model), parallel)
        self.model = model = eager_module(model)
        plan = find_layers(model)
        reasons = {name: options.exclusion(layer) or "" for name, layer in plan.layers.items()}
        plan = plan.without(excluded_layers(plan, groups) | {n: r for n, r in reasons.items() if r})
        self.device = next(model.parameters()).device
        self.clip, norm_rate = clip, 0.0 if clip is None else clip.lowest_rate
        self.schedule = Schedule(schedule, self.device, self.reducer.mean, norm_rate)
        overhead = schedule.overhead if isinstance(schedule, Periods) else None
        self.allowance = Allowance(overhead, norm_rate, quiet=self.reducer.rank > 0)
        self.curvature = ModelCurvature(plan, options, self.reducer)
        self.fallback = Fallback(model, plan, self.curvature, self.reducer)
        self.reducer.place(self.curvature.layers, longest(schedule.inverse or Periods().inverse))
        self.refresher = InverseRefresher(self.curvature, parallel, self.reducer)
        shared_seed = self.reducer.share(torch.initial_seed() if seed is None else seed)
        self.collector = Collector(model, self.curvature, losses, shared_seed, self.reducer)
        self.steps = 0
        self.skipped_steps = SkippedSteps()
        self.in_doubt: Tensor | None = None
        # Whether solve_() has to find out if the gradients are finite.
        self._is_unchecked = False
        self._quietly: Tensor | None = None
        self._before: tuple[Any, ...] | None = None
        self._fallen: list[str] | None = None
        self.divergence = Divergence(model)
        self.members = Members(model, plan)
        # The layers that were replaced since the last step: their forward pass was not seen.
        self._replaced: set[str] = set()
        self._hooks = self._new_hooks()
        self._prepare_next()

    def _new_hooks(self) -> ModelHooks:
        in_eval, layers = self.curvature.options.gather_in_eval, self.members.plan.layers
        return ModelHooks(self.model, layers, self.collector, in_eval=in_eval)

    @property
    def plan(self) -> Plan:
        """The layers of the model that have curvature, and why the others have none."""
        return self.fallback.plan

    def close(self) -> None:
        """Remove every hook from the model and end the thread; the factors stay readable."""
        self._hooks.close()
        self.members.close()
        self.refresher.close()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the trained parameters that have one, by name."""
        found, replaced = self.members.gradients()
        if replaced and self._hooks.close.alive:
            self._replaced = self.members.adopt(replaced)
            self._hooks.close()
            self._hooks = self._new_hooks()
        return found

    # A step

    def begin_step(
        self,
        gradients: Mapping[str, Tensor],
        loss_scale: float | Tensor = 1.0,
        overflow: Tensor | None = None,
        *,
        wait: bool = False,
        solves: bool = False,
    ) -> BatchStatistics | None:
        """Return the statistics of the batch, or ``None`` if the step was skipped.

        A step is skipped if a gradient or a statistic is not finite. If no statistics or inverses
        are due, the host does not wait for an accelerator to find out, unless ``wait`` is set;
        ``in_doubt`` then holds the answer.

        Args:
            gradients: the gradients by parameter name.
            loss_scale: the factor of the loss that the gradients do not have any more.
            overflow: whether the caller found the batch bad, to be skipped without a warning.
            solves: whether ``solve_()`` follows, which finds bad gradients without further work.
        """
        if not self._hooks.close.alive:
            raise RuntimeError("the optimizer is closed: its hooks are removed; make a new one")
        self.in_doubt = self._quietly = None
        self._fallen = self.fallback.state_dict()
        self.refresher.raise_errors(self.steps + 1)
        with self.full_precision():
            batch = self.collector.finish(loss_scale)
            clock = self.collector.clock
            if clock.spent:
                self.schedule.add_seconds("statistics", clock.spent)
            if self.steps == 0:
                self._require_statistics(gradients, batch)
            self.schedule.begin_measuring(clock.started, clock.spent)
            self.reducer.check_equal(self.model, gradients, self.steps + 1, first=self._is_first)
            self._is_first = False
            self.fallback.add(batch.moments, gradients, for_now=self._replaced)
            return batch if self._is_good(gradients, batch, overflow, wait, solves) else None

    def _require_statistics(self, gradients: Mapping[str, Tensor], batch: BatchStatistics) -> None:
        covered = any(name in self.plan.layer_of for name in gradients)
        is_known = batch.moments or not self.curvature.is_empty()
        if is_known or self.collector.observations or (gradients and not covered):
            return
        raise RuntimeError(
            "step() before any forward pass in training mode: there are no statistics yet. Call "
            "model.train(), run the model and loss.backward() first, and call the model itself, "
            "not its parts. To train in evaluation mode, pass "
            "curvature=kfc.Kronecker(gather_in_eval=True)"
        )

    def _is_good(
        self,
        gradients: Mapping[str, Tensor],
        batch: BatchStatistics,
        overflow: Tensor | None,
        wait: bool,
        solves: bool,
    ) -> bool:
        """Return whether the batch may be used, as far as the host knows."""
        with self.schedule.timed("check"):
            due = batch.moments or self._inverses_are_due() or self.curvature.lacks_inverses()
            wait = wait or bool(due)
            self._is_unchecked = solves and not (wait or self.is_asynchronous or overflow)
            if self._is_unchecked:
                return True
            scalars = [*finite_scalars(gradients.values()), *batch.traces()]
            if self.is_asynchronous and not wait:
                bad = ~all_finite(scalars)
                self.doubt(bad if overflow is None else bad | moved(overflow, bad.device), overflow)
                return True
            overflowed = overflow is not None and bool(overflow)
            if are_finite(scalars) and not overflowed:
                return True
        self.skip_step(quietly=overflowed)
        return False

    def update_(self, batch: BatchStatistics, *, may_skip: bool = False) -> None:
        """Average the batch's statistics into the factors (T_s); this uses up the batch.

        Args:
            may_skip: whether the step may still be skipped; only then is the memory of the factors
                and inverses before the step kept until its end.
        """
        if may_skip:
            self._before = (
                *(self.curvature.snapshot(), self.refresher.snapshot()),
                *(self.allowance.snapshot(), self._replaces_guess),
            )
        if batch.moments:
            work = work_of(batch, self._other_work(), self.clip, self.reducer.size)
            self.allowance.count(self.curvature, work)
        with self.schedule.timed("averages"), self.full_precision():
            self.curvature.update_(batch, replace=self._replaces_guess)
        if self.steps == 0:
            # The next statistics replace those of the first step, if their scale was a guess.
            guesses = self.reducer.gather([float(self.collector.known.is_guess)])
            self._replaces_guess = any(guess for (guess,) in guesses)
        elif batch.examples:
            self._replaces_guess = False

    def _other_work(self) -> float:
        """Return what passes do besides layers, the same on all ranks; see ``ModelWork``."""
        if self.allowance.others is None:
            return self.reducer.mean([self._hooks.others or 0.0])[0]
        return self.allowance.others

    def refresh_inverses(self, damping: Callable[[str], Damping], *, at_once: bool = False) -> None:
        """Refresh the inverses that are due (T_f).

        Args:
            damping: returns δ of a layer's weight and bias, by its name.
            at_once: refresh all inverses in this step, due or not.
        """
        step = self.steps + 1
        with self.schedule.timed("inverses"), self.full_precision():
            self.refresher.refresh(
                step,
                damping,
                due=self._inverses_are_due(),
                period=self.schedule.lengths(step)["inverse"],
                at_once=at_once,
            )

    def solve_(
        self, vectors: dict[str, Tensor], diagonals: Mapping[str, Tensor] = MappingProxyType({})
    ) -> dict[str, Scalar] | None:
        """Replace vectors v in a dict by F̂_damped⁻¹ v (eqn 11), and return vᵀ F̂_damped⁻¹ v.

        All are by parameter name, the vectors in new tensors. See ``ModelCurvature.solve_()``.

        Returns:
            ``None`` if the step was skipped because a vector is not finite.
        """
        with self.schedule.timed("natural gradient"), self.full_precision():
            products = self.curvature.solve_(vectors, diagonals)
            if self.is_asynchronous:
                return {**products}
            known: dict[str, Scalar] = {name: each.item() for name, each in products.items()}
        if self._is_unchecked and not all(map(math.isfinite, known.values())):
            self.skip_step()
            return None
        return known

    def known(self, scalar: Scalar) -> Scalar:
        """Return a number, or a scalar on the model's device if the host would wait for it."""
        if not isinstance(scalar, Tensor):
            return scalar
        return moved(scalar, self.device) if self.is_asynchronous else scalar.item()

    def doubt(self, bad: Tensor, quietly: Tensor | None = None) -> None:
        """Mark the step in progress as bad if a boolean scalar on the device is true."""
        before = self.in_doubt
        self.in_doubt = bad if before is None else before | moved(bad, before.device)
        self._quietly = quietly if quietly is not None else self._quietly

    def end_step(self, *, with_norms: bool = False) -> None:
        """Count the step.

        Args:
            with_norms: whether exact Fisher norms were computed.
        """
        self.reducer.end_step()
        self.collector.buffers.end_step(self.in_doubt)
        if self.in_doubt is not None:
            self.skipped_steps.add_on_device(self.in_doubt, self._quietly)
        self.divergence.end_step(is_good=self.in_doubt is None)
        self.schedule.end_measuring(self.steps + 1)
        refreshed = self._statistics_are_due(), self._inverses_are_due()
        self.allowance.end_step(self.steps + 1, *refreshed, with_norms)
        self.fallback.end_step()
        self._replaced = set()
        if self.steps == 0:
            log_start(self)
        self.steps += 1
        self._prepare_next()

    def skip_step(self, *, quietly: bool = False) -> None:
        """Count a skipped step. Curvature and buffers are unchanged, and refreshes remain due.

        Args:
            quietly: do not warn, as for a step with an overflow of ``torch.amp.GradScaler``.
        """
        quietly = quietly or (self._quietly is not None and bool(self._quietly))
        self.rewind()
        self.fallback.end_step()
        self.collector.buffers.undo_step()
        ranks = "" if quietly else self.reducer.cause_of_bad_step()
        self.collector.undo()
        self._prepare_next()
        self.skipped_steps.add(
            self.steps + 1, None if quietly else partial(cause, self.model, ranks)
        )
        if not quietly:
            self.divergence.skip()
            self.reducer.skip_step(self.steps + 1, ranks)

    def undo_step(self) -> None:
        """Undo the step in progress after an error: later steps are as if it had not begun.

        Factors are returned to what they were only if ``update_()`` was told that the step may be
        skipped; no code of the user runs in other steps.
        """
        self.rewind()
        if self._fallen is not None and self._fallen != self.fallback.state_dict():
            self.fallback.restore(self._fallen)
        self.collector.buffers.undo_step()
        with suppress(CollectiveError):  # of ranks that have ended
            self.collector.undo()
        self._prepare_next()

    def rewind(self) -> None:
        """Return the factors and inverses to their state before the step in progress."""
        if self._before is not None:
            states, refresher, allowance, self._replaces_guess = self._before
            self.curvature.restore(states)
            self.refresher.restore(refresher)
            self.allowance.restore(allowance, self.curvature)

    def _prepare_next(self) -> None:
        self.in_doubt = self._quietly = self._before = self._fallen = None
        clock, due = self.schedule.clock_device, self._statistics_are_due()
        self.collector.begin_step(self.steps + 1, due=due, clock_device=clock)

    def _statistics_are_due(self) -> bool:
        return self.schedule.statistics_are_due(self.steps + 1) and self.allowance.allows(
            STATISTICS
        )

    def _inverses_are_due(self) -> bool:
        return self.schedule.inverses_are_due(self.steps + 1) and self.allowance.allows(INVERSES)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host has to wait for results of the model's device."""
        return is_asynchronous(self.device)

    def full_precision(self) -> AbstractContextManager[object]:
        return without_autocast(self.device)

    def compare_ranks(
        self, options: Mapping[str, object], current: Callable[[], Mapping[str, str]]
    ) -> None:
        """Raise an error on all ranks if they have other models or options; then or later.

        Args:
            options: the options of the optimizer, by name.
            current: returns what may change.
        """
        own = {"curvature": self.curvature.options, "schedule": self.schedule.options}
        self.reducer.agree_on(described(self.model, self.plan, {**options, **own}), current)
