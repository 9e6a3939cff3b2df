"""KFC's curvature as a preconditioner for any optimizer."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kfc._helpers import require_number
from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice, resolve_curvature
from kfc.distributed.options import Parallel
from kfc.fisher.compiled import outside_of_compiled_graphs
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.optimizers.access import CurvatureAccess
from kfc.optimizers.attempts import Attempt
from kfc.optimizers.engine import Engine
from kfc.optimizers.saved import shared_digest
from kfc.optimizers.versions import check_version, versioned
from kfc.schedule import Budget, Periods


class Preconditioner(CurvatureAccess):
    """Replaces gradients by natural gradients, for use with any optimizer.

    Examples:
        >>> preconditioner = kfc.Preconditioner(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
        >>> for images, labels in loader:
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(images), labels).backward()
        ...     preconditioner.step()  # gradients become natural gradients, in place
        ...     optimizer.step()

    Args:
        model: the network. Hooks gather statistics whenever it runs in training mode.
        damping: δ, added to the curvature (λ + γ in the paper).
        likelihood: the distribution that the outputs parametrise and the loss assumes:
            ``"categorical"``, ``"bernoulli"``, ``"gaussian"``, a ``kfc.Likelihood``, or
            ``"auto"``: chosen from the derivative of the loss in the first backward pass. If the
            loss is a sum of losses of several outputs, a dict with the likelihood of each.
        output: selects the outputs from what the model returns, if that is not a tensor: a tensor,
            or a dict of tensors if ``likelihood`` is a dict. By default the attribute ``logits``,
            or the only tensor in a tuple that requires a gradient and is not a scalar.
        strict: raise an error if the loss does not fit the likelihood; by default a warning.
        seed: the seed of the generator that draws targets; by default torch's initial seed. The
            global generator is not used.
        curvature: how the Fisher blocks of linear and convolutional layers are approximated:
            ``"kfc"``, ``"sua"``, ``"prong"``, ``"ekfac"``, ``"diagonal"``, or one of the objects
            ``kfc.Kronecker``, ``kfc.SUA``, ``kfc.PRONG``, ``kfc.EKFAC``,
            ``kfc.Diagonal`` with options.
        schedule: when statistics and inverses are refreshed: ``kfc.Periods`` or
            ``kfc.Budget``.
        parallel: how ranks divide the work, and asynchronous inverses: ``kfc.Parallel``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = 1e-3,
        likelihood: LikelihoodChoice = "auto",
        output: Output | None = None,
        strict: bool = False,
        seed: int | None = None,
        curvature: CurvatureChoice = "kfc",
        schedule: Periods | Budget = Periods(overhead=0.2),  # noqa: B008 - immutable
        parallel: Parallel | None = None,
    ) -> None:
        require_number("damping", damping)
        self.damping = damping
        self.engine = Engine(
            model,
            likelihood=likelihood,
            output=output,
            strict=strict,
            seed=seed,
            curvature=resolve_curvature(curvature),
            schedule=schedule,
            parallel=parallel,
        )
        self._loaded, me = 0, weakref.ref(self)

        def current() -> dict[str, str]:
            loaded = getattr(me(), "_loaded", 0)
            return {"the checksum of the state that was loaded": str(loaded)}

        options = {"optimizer": "Preconditioner", "damping": damping, "likelihood": likelihood}
        self.engine.compare_ranks(options, current)

    @torch.no_grad()
    @outside_of_compiled_graphs(callees=True)
    def step(self, loss_scale: float = 1.0) -> bool:
        """Replace the gradients by natural gradients, in place, after ``loss.backward()``.

        Args:
            loss_scale: the scale of the loss in the backward pass, if the gradients were unscaled
                afterwards (``GradScaler.unscale_``). Weights that are read from the
                loss contain it.

        Returns:
            False if the batch produced values that are not finite. The gradients are then removed,
            so that the optimizer's own step leaves the parameters alone.
        """
        with Attempt(self.engine):
            return self._make_step(loss_scale)

    def _make_step(self, loss_scale: float) -> bool:
        engine, gradients = self.engine, self.engine.gradients()
        batch = engine.begin_step(gradients, loss_scale, wait=True)
        if batch is None:
            self.model.zero_grad(set_to_none=True)
            return False
        engine.update_(batch)
        engine.refresh_inverses(lambda _: Damping.uniform(self.damping))
        update = dict(gradients)
        engine.solve_(update)
        for name, natural in update.items():
            gradients[name].copy_(natural)
        engine.end_step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume bit for bit; call it between steps."""
        return versioned(self.engine.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, all of it or nothing.

        Raises:
            ValueError: an entry does not fit, or is not usable; the message names it.
        """
        check_version(state_dict)
        self.engine.load_state_dict(state_dict)
        if self.engine.reducer.size > 1:
            self._loaded = shared_digest(state_dict)
