"""What users can read and set of the curvature, for every optimizer alike."""

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import tree_leaves
from kfc.curvature.channels import ChannelCurvature
from kfc.curvature.description import describe_layers
from kfc.curvature.kronecker import Factors
from kfc.curvature.layer import LayerState
from kfc.fisher.calls import SavedBuffers, accelerators_of, call_of, forked_random_state
from kfc.optimizers.costs import Costs, counted_costs
from kfc.optimizers.engine import Engine
from kfc.optimizers.work import expected_work

# Called with the number of batches done and, if known, their total number.
Progress = Callable[[int, int | None], None]


class NonFiniteStatisticsError(ValueError, FloatingPointError):
    """A batch of an estimate gave statistics that are not finite."""


class CurvatureAccess:
    """The curvature as users see it."""

    engine: Engine

    @property
    def model(self) -> nn.Module:
        """The model that is trained, without its DDP wrapper."""
        return self.engine.model

    @property
    def factors(self) -> dict[str, Factors]:
        """Ω and Γ of every Kronecker-factored layer by name, once there are statistics.

        ``.activation`` and ``.derivative`` are (n, n), or (groups, n, n) for several groups. A
        factor wider than ``max_factor_size`` is stored as its diagonal, with one dimension less;
        so is Γ = c I of ``kfc.PRONG``. Layers of ``kfc.Diagonal`` have no factors.
        """
        found = {}
        for name, layer in self.engine.curvature.layers.items():
            factors = layer.factors()
            if factors is not None:
                found[name] = Factors(*(f.squeeze(0) if f.shape[0] == 1 else f for f in factors))
        return found

    @property
    def activation_factors(self) -> dict[str, Tensor]:
        """Ω of every layer that has one by name, once there are statistics; see ``factors``.

        ``kfc.WhitenedAdam`` keeps Ω of a wide layer in B blocks of inputs, (groups · B, n_B, n_B),
        each with its own leading 1; ``describe()`` says how many.
        """
        layers = self.engine.curvature.layers.items()
        found = {name: layer.activation_factor() for name, layer in layers}
        return {
            name: factor.squeeze(0) if factor.shape[0] == 1 else factor
            for name, factor in found.items()
            if factor is not None
        }

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The Fisher blocks of every normalisation layer by name, (channels, 2, 2)."""
        return {
            name: layer.state.running[0]
            for name, layer in self.engine.curvature.layers.items()
            if isinstance(layer, ChannelCurvature) and layer.state.running is not None
        }

    @property
    def divergence(self) -> str | None:
        """Why training has diverged, as a sentence that names parameters; ``None`` if it has not.

        It has diverged if the last ten steps were skipped because values were not finite, or if the
        loss on each of the last ten batches was more than 1,000 times as high as on any of the
        first ten. The loss counts from the least that it could be, and is known if the optimizer
        has a loss bound. Cheap enough to read after every step.
        """
        return self.engine.divergence.reason()

    @property
    def diagnostics(self) -> dict[str, Any]:
        """A dict of numbers about the last steps.

        ``step``; ``skipped_steps``; ``skipped_in_a_row``, those of them since the last good step;
        ``seconds``, the time of each part when it was last done, as
        the host sees it; ``total_seconds``, since the start; ``periods``; ``staleness``, the age of
        the inverses in steps; ``ranks``; and ``layers``: π, damping and factor traces by layer,
        and ``bias_damping`` if a bias is trained. Reading it waits for the device.
        """
        engine = self.engine
        layers = {
            name: {**layer.summary(), **_dampings(layer.state)}
            for name, layer in engine.curvature.layers.items()
            if layer.state.running is not None
        }
        return {
            "step": engine.steps,
            "skipped_steps": engine.skipped_steps.count(),
            "skipped_in_a_row": engine.divergence.skipped_in_a_row,
            "seconds": {"statistics": 0.0, **engine.schedule.seconds},
            "total_seconds": {"statistics": 0.0, **engine.schedule.total_seconds},
            "periods": engine.schedule.describe(engine.steps + 1),
            "staleness": engine.refresher.staleness(engine.steps),
            "ranks": engine.reducer.describe(),
            "layers": layers,
        }

    def describe(self, inputs: Any = None) -> str:
        """Print and return how the parameters and the loss are treated, why, and what it costs.

        Args:
            inputs: a batch, as a tensor, a tuple of arguments or a dict. The model runs on it once
                to count the multiply-adds of such steps. Without it, those of past steps are shown.
        """
        engine, expected, columns = self.engine, None, {}
        if inputs is not None:
            work = expected_work(engine, inputs)
            columns = engine.allowance.columns_for(engine.curvature, work)
            expected = counted_costs(engine.curvature, work, columns)
        others = self._treatments_without_block()
        table = describe_layers(self.model, engine.plan, engine.curvature, columns, others)
        text = "\n".join([table, *self._notes(expected)])
        print(text)
        return text

    def _treatments_without_block(self) -> dict[str, str]:
        """Return how the parameters without a Fisher block are treated, by name."""
        return dict.fromkeys(self.engine.plan.plain, self.engine.curvature.options.fallback)

    def _notes(self, expected: Costs | None) -> list[str]:
        """Return what ``describe()`` says below its table.

        Args:
            expected: the costs of a step, if they were counted.
        """
        engine = self.engine
        return [engine.allowance.describe(expected), engine.collector.losses.describe()]

    def close(self) -> None:
        """Remove all hooks from the model and end the thread; no step can follow."""
        self.engine.close()

    def estimate_factors(
        self,
        batches: Iterable[Any],
        loss: Callable[[Any, Any], Tensor] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Set the factors from many batches, as at the start of Algorithm 1 (eqn 32).

        Parameters, gradients, buffers and the random state stay as they were.

        Examples:
            >>> optimizer.estimate_factors(loader, lambda out, batch: loss(out, batch[1]))

        Args:
            batches: each item is the model's input, or a tuple or list that begins with it. An
                input that is a tuple or a dict holds the model's arguments.
            loss: the loss that will be minimised, as a function of what the model returns and of
                the item. Without it, the loss must be the one that ``likelihood=`` describes.
            progress: called after each batch with the number of batches done and, if known, the
                total number.
        """
        engine, collector = self.engine, self.engine.collector
        options, losses = engine.curvature.options, collector.losses
        if options.fisher == "empirical":
            raise ValueError(
                'estimate_factors draws targets from the model; with fisher="empirical" the '
                "backward passes of the first steps give the factors"
            )
        if not (self.model.training or options.gather_in_eval):
            raise RuntimeError(
                "no statistics are gathered in evaluation mode; call model.train() before "
                "estimate_factors, or pass curvature=kfc.Kronecker(gather_in_eval=True)"
            )
        known = len(losses.likelihoods) == len(losses.by_name)
        if loss is None and options.needs_derivatives and not known:
            raise ValueError(
                "before the first backward pass the likelihood is not known: pass the loss, as in "
                "estimate_factors(loader, lambda out, batch: F.cross_entropy(out, batch[1])), or "
                "likelihood= to the optimizer"
            )
        buffers, random_state = SavedBuffers(self.model), accelerators_of(self.model)
        try:
            estimating = collector.estimation(has_loss=loss is not None)
            with estimating, forked_random_state(random_state):
                self._run(batches, loss, progress)
                engine.curvature.replace_(collector.finish())
                engine.refresher.forget()
        finally:
            buffers.restore()
        # The ranks may have drawn from their generators unequally often.
        generator = collector.draws.generator
        generator.load_state_dict(engine.reducer.share(generator.state_dict()))

    def _run(
        self,
        batches: Iterable[Any],
        loss: Callable[[Any, Any], Tensor] | None,
        progress: Progress | None,
    ) -> None:
        """Run the model on all batches; raise on all ranks if one had a bad batch."""
        done, total, bad = 0, _length(batches), -1
        for done, batch in enumerate(batches, start=1):
            with torch.enable_grad():
                call = call_of(self.model, batch[0] if isinstance(batch, (tuple, list)) else batch)
                result = self.model(*call.args, **call.kwargs)
                if loss is not None:
                    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                    trained = [leaf for leaf in leaves if leaf.requires_grad]
                    torch.autograd.grad(loss(result, batch), trained, allow_unused=True)
                    self.engine.collector.end_estimate()
            if not self.engine.collector.is_finite():
                bad = done - 1
                break
            if progress is not None:
                progress(done, total)
        reducer = self.engine.reducer
        by_rank = reducer.gather([float(done), float(bad)])
        for rank, (_, batch) in enumerate(by_rank):
            if batch >= 0:
                raise NonFiniteStatisticsError(
                    f"batch {batch:.0f}{reducer.where([rank])} gave statistics that are not finite"
                )
        if not any(count for count, _ in by_rank):
            raise ValueError("estimate_factors was given no batches")


def _length(batches: Iterable[Any]) -> int | None:
    """Return the number of batches if it is known; a loader over a stream has none."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None


def _dampings(state: LayerState) -> dict[str, float]:
    """Return δ of a layer, and that of its bias if it is trained."""
    weight, bias = state.damping
    return {"damping": weight} | ({"bias_damping": bias} if "bias" in state.roles else {})
