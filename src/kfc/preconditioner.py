"""The curvature of a model, kept up to date: statistics, inverses, natural gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfc.capture import Capture, ModelCall, Session, without_autocast
from kfc.checks import (
    all_finite,
    largest_entries,
    require_choice,
    require_keys,
    require_number,
)
from kfc.curvature import Curvature
from kfc.description import describe_layers
from kfc.fisher import Output, select_output
from kfc.generator import OwnGenerator
from kfc.kronecker import INVERSES, Factors
from kfc.layers import KroneckerHandler, NormalisationHandler, mixes_examples, plan_layers
from kfc.layers.base import DEFAULT_MAX_FACTOR_SIZE
from kfc.likelihoods import Likelihood, resolve_likelihood
from kfc.periods import Period, Stretch, is_due, require_period

FisherKind = Literal["sampled", "exact", "empirical"]
InverseKind = Literal["factored", "eigen"]
FISHER_KINDS = ("sampled", "exact", "empirical")

# Why these: see docs/choosing.md.
DEFAULT_STATISTICS_PERIOD = Stretch(10)
DEFAULT_INVERSE_PERIOD = Stretch(20)

# The exact Fisher takes one backward pass per column.
MAX_EXACT_COLUMNS = 1024


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
            :class:`kfc.Stretch`.
        inverse_period: T_f, likewise for inverses.
        factor_decay: ξ, the weight of the old value in the factors' moving averages.
        max_factor_size: factors wider than this keep their diagonal only.
        likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or a :class:`kfc.Likelihood`.
        fisher: ``"sampled"`` targets (one draw), the ``"exact"`` expectation over them, or
            ``"empirical"``, the targets of the data, seen in your own backward pass.
        inverse: ``"factored"`` damping of each factor (Cholesky), or ``"eigen"``: exact damping.
        output: picks the tensor of outputs from what the model returns, if that is not a tensor.
        seed: of the generator that draws targets; by default torch's initial seed. The global
            generator is left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = 1e-3,
        statistics_period: Period = DEFAULT_STATISTICS_PERIOD,
        inverse_period: Period = DEFAULT_INVERSE_PERIOD,
        factor_decay: float = 0.95,
        max_factor_size: int = DEFAULT_MAX_FACTOR_SIZE,
        likelihood: str | Likelihood = "categorical",
        fisher: FisherKind = "sampled",
        inverse: InverseKind = "factored",
        output: Output | None = None,
        seed: int | None = None,
    ) -> None:
        require_period("statistics_period", statistics_period)
        require_period("inverse_period", inverse_period)
        require_period("max_factor_size", max_factor_size)
        require_number("damping", damping)
        require_number("factor_decay", factor_decay, below=1)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be a whole number or None, got {seed!r}")
        require_choice("fisher", fisher, FISHER_KINDS)
        require_choice("inverse", inverse, tuple(INVERSES))
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if next(model.parameters(), None) is None:
            raise ValueError("the model has no parameters to train")
        self.model = model
        self.damping = damping
        self.statistics_period = statistics_period
        self.inverse_period = inverse_period
        self.factor_decay = factor_decay
        self.likelihood = resolve_likelihood(likelihood)
        self.fisher = fisher
        self.plan = plan_layers(model, max_factor_size)
        self.steps = 0
        self.skipped_steps = 0
        self.seconds: dict[str, float] = {}
        self.last_call: ModelCall | None = None
        self.last_examples = 0
        self._output = output
        self.curvature = Curvature(self.plan, inverse)
        self._open_sessions: list[tuple[Session, Tensor]] = []
        self._pending_examples = 0
        self._estimating = False
        self._warned_of_skipping = False
        self._generator = OwnGenerator(torch.initial_seed() if seed is None else seed)
        self._capture = Capture(
            model, self.plan.handlers, self, during_backward=fisher == "empirical"
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
        if not self.begin_step(gradients, lambda _: self.damping, loss_scale):
            self.model.zero_grad(set_to_none=True)
            return False
        for name, natural in self.natural_gradient(gradients).items():
            gradients[name].copy_(natural)
        self.end_step()
        return True

    @property
    def factors(self) -> dict[str, Factors]:
        """Ω and Γ of every Kronecker-factored layer by name, once there are statistics.

        ``.activation`` and ``.derivative`` are (n, n), or (groups, n, n) for several groups. A
        factor wider than ``max_factor_size`` is its diagonal, one dimension less.
        """
        return {
            name: Factors(*(f.squeeze(0) if f.shape[0] == 1 else f for f in running))
            for name, running in self.curvature.running()
            if isinstance(self.plan.handlers[name], KroneckerHandler)
        }

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
        if self.fisher == "empirical":
            raise ValueError(
                'estimate_factors draws targets from the model; with fisher="empirical" the first '
                "steps' own backward passes give the factors"
            )
        if not self.model.training:
            raise RuntimeError(
                "no statistics are gathered in evaluation mode; call model.train() before "
                "estimate_factors"
            )
        device = next(self.model.parameters()).device
        forked = [device] if device.type != "cpu" else []
        with (
            self._estimation(),
            torch.random.fork_rng(forked, device_type=device.type if forked else "cuda"),
        ):
            done, total = 0, _length(batches)
            for done, batch in enumerate(batches, start=1):
                with torch.enable_grad():
                    self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)
                if not all_finite(self.curvature.pending_traces()):
                    raise ValueError(f"batch {done - 1} gave statistics that are not finite")
                if progress is not None:
                    progress(done, total)
            if done == 0:
                raise ValueError("estimate_factors was given no batches")
            self._complete_statistics()
            self.curvature.replace_by_pending()

    def describe(self) -> str:
        """Print, and return, how every parameter is treated, and why."""
        text = describe_layers(self.model, self.plan, self.curvature.inverse_kind)
        print(text)
        return text

    def close(self) -> None:
        """Remove every hook from the model; the factors stay readable."""
        self._capture.close()

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Counters, seconds by part (of the last time it was done) and numbers for every layer."""
        layers = {
            name: {
                **self.plan.handlers[name].summary(running),
                "damping": self.curvature.layers[name].damping,
            }
            for name, running in self.curvature.running()
        }
        return {
            "step": self.steps,
            "skipped_steps": self.skipped_steps,
            "seconds": dict(self.seconds),
            "layers": layers,
        }

    # What optimizers built on it call: gradients, begin_step, natural_gradient, end_step

    def gradients(self) -> dict[str, Tensor]:
        """By name; parameters that are frozen or have no gradient are left alone."""
        found: dict[str, Tensor] = {}
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
        loss_scale: float = 1.0,
    ) -> bool:
        """Take up the batch's statistics and renew the inverses that are due.

        Args:
            gradients: by parameter name.
            damping: δ of a layer, by its name.

        Returns:
            False, with nothing changed but the count of skipped steps, if the batch gave a
            gradient or a statistic that is not finite.
        """
        if not self._capture.close.alive:
            raise RuntimeError("the optimizer is closed: its hooks are gone; make a new one")
        with self._full_precision():
            self._complete_statistics(loss_scale)
            with self.timed("check"):
                statistics = self.curvature.pending_traces()
                finite = all_finite([*statistics, *largest_entries(gradients.values())])
            if not finite:
                self.skip_step()
                return False
            if self.steps == 0:
                self._refuse_without_statistics(gradients)
            self.curvature.take_up(self.factor_decay)
            due = is_due(self.inverse_period, self.steps + 1)
            with self.timed("inverses"):
                self.curvature.refresh_inverses(damping, only_missing=not due)
        return True

    def natural_gradient(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """F̂_damped⁻¹ times the gradients (eqn 10), by parameter name.

        Parameters without a handler keep their plain gradient.
        """
        with self.timed("natural gradient"), self._full_precision():
            return self.curvature.natural_gradient(gradients)

    def end_step(self) -> None:
        self.steps += 1
        self.last_call = None

    def skip_step(self, *, quietly: bool = False) -> None:
        """Drop the batch's statistics, and count; with a warning the first time."""
        self._drop_statistics()
        self.skipped_steps += 1
        if quietly or self._warned_of_skipping:
            return
        self._warned_of_skipping = True
        warnings.warn(
            f"step {self.steps + 1} was skipped: the batch gave gradients, statistics or a Fisher "
            "norm that are not finite. Parameters and factors are unchanged; further skipped "
            "steps are only counted, in diagnostics['skipped_steps'].",
            stacklevel=2,
        )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Keep the seconds that a part of the step took, as the host sees them."""
        start = perf_counter()
        yield
        self.seconds[part] = perf_counter() - start

    # What the hooks call

    def wanted_layers(self) -> Collection[str]:
        if self._estimating or is_due(self.statistics_period, self.steps + 1):
            return self.plan.handlers.keys()
        # A layer that ran for the first time, or was thawed, cannot wait until statistics are due.
        return [name for name in self.plan.handlers if not self.curvature.is_known(name)]

    def observe(self, call: ModelCall, output: Any, session: Session | None) -> None:
        selected = select_output(output, self._output)
        self.likelihood.validate(selected)
        self.last_call, self.last_examples = call, selected.shape[0]
        if session is None or not session.calls or not selected.requires_grad:
            return
        session.examples = selected.shape[0]
        if self.fisher == "empirical":
            # The calls' hooks do the rest; their edges would hold the graph in a cycle.
            session.calls.clear()
            self._open_sessions.append((session, selected.detach()))
            return
        with self.timed("statistics"), torch.no_grad(), without_autocast(selected.device):
            together = not (mixes_examples(self.model) or session.shares_rows())
            for derivative in self._output_derivatives(selected.detach(), together):
                session.backward(selected, derivative)
            # As if of one example: _complete_statistics knows how many there are in all.
            scale = self.likelihood.growth(session.examples, 1)
            self.curvature.add(session.moments(), scale)
            self._pending_examples += session.examples
        self.seconds["statistics"] += session.forward_seconds

    def _output_derivatives(self, outputs: Tensor, together: bool) -> Iterator[Tensor]:
        """The draws, or exact columns, of the derivative in the outputs.

        Args:
            together: whether one column may serve all examples at once, since no layer sees two.
        """
        if self.fisher == "sampled":
            yield self.likelihood.sample_derivative(outputs, self._generator.on(outputs.device))
            return
        columns = self.likelihood.columns_per_example(outputs) * (1 if together else len(outputs))
        if columns > MAX_EXACT_COLUMNS:
            behind = "" if together else " behind batch normalisation or rows that examples share"
            raise ValueError(
                f'fisher="exact" takes one backward pass for each of the {columns} columns of an '
                f"output of shape {tuple(outputs.shape)}{behind}, more than {MAX_EXACT_COLUMNS}; "
                'use fisher="sampled"'
            )
        for column in self.likelihood.derivative_columns(outputs):
            if together:
                yield column
                continue
            for example in range(len(outputs)):
                alone = torch.zeros_like(column)
                alone[example] = column[example]
                yield alone

    def _complete_statistics(self, loss_scale: float = 1.0) -> None:
        """Bring the pending statistics to the scale of the loss on the whole batch."""
        if self.fisher == "empirical":
            self._close_sessions(loss_scale)
        elif self._pending_examples:
            self.curvature.scale_pending(self.likelihood.growth(1, self._pending_examples))
        self._pending_examples = 0

    def _close_sessions(self, loss_scale: float) -> None:
        """Empirical Fisher: the user's backward has been through these sessions.

        It had w times the log-likelihood's derivative; wanted is sqrt(w N) times that.
        """
        for session, _ in self._open_sessions:
            session.end_draw()
        gathered = [(session, out, session.moments()) for session, out in self._open_sessions]
        finished = [item for item in gathered if any(item[2].values())]
        examples = sum(session.examples for session, *_ in finished)
        for _, outputs, moments in finished:
            weight = self.likelihood.term_weight(outputs, examples) * loss_scale**2
            self.curvature.add(moments, examples / weight)
        self._open_sessions.clear()

    def _drop_statistics(self) -> None:
        self._open_sessions.clear()
        self._pending_examples = 0
        self.curvature.pending.clear()
        self.last_call = None

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
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._drop_statistics()
        self._estimating = True
        try:
            yield
        finally:
            self._estimating = False
            self._drop_statistics()
            with torch.no_grad():
                for module, name, buffer, saved in buffers:
                    module._buffers[name] = buffer.copy_(saved)

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bit for bit; call it between steps."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "generator": self._generator.state_dict(),
            "curvature": self.curvature.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error that says why if the state cannot be loaded here; change nothing."""
        require_keys(
            "preconditioner state", state, ("steps", "skipped_steps", "generator", "curvature")
        )
        require_keys("generator state", state["generator"], ("seed", "device", "state"))
        self.curvature.check_state(state["curvature"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the model's own parameters are loaded separately."""
        self.check_state(state)
        self.steps = state["steps"]
        self.skipped_steps = state["skipped_steps"]
        self._drop_statistics()
        self._generator.load_state_dict(state["generator"])
        self.curvature.load_state_dict(state["curvature"])


def _length(batches: Iterable[Any]) -> int | None:
    """How many there are, if they say so; a loader over a stream has a length that raises."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None
