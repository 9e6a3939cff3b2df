"""Layers that lose their curvature because no statistics of them arrive."""

import warnings
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from kfc.curvature.model import ModelCurvature
from kfc.curvature.saved import require_names
from kfc.distributed.reducer import Reducer
from kfc.layers import Plan

REASON = "no statistics: its module did not run, or did not reach the outputs"
# The number of names in a warning.
MOST_NAMES = 5


class Fallback:
    """Keeps track of the layers that have lost their curvature.

    Args:
        plan: the plan at construction.

    Attributes:
        plan: the plan without these layers.
        parameters: the names of their parameters.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, curvature: ModelCurvature, reducer: Reducer
    ) -> None:
        self._model = model
        self._whole = self.plan = plan
        self._curvature, self._reducer = curvature, reducer
        self._layers: list[str] = []
        self._for_now: list[str] = []
        self.parameters: set[str] = set()

    def add(
        self, gathered: Collection[str], gradients: Mapping[str, Tensor], for_now: Collection[str]
    ) -> None:
        """Let layers fall back that have a gradient on any rank, but no statistics.

        Warn once for all of them. A layer whose gradients are zero falls back until the end of the
        step only, without a warning: its examples may be in other batches.

        Args:
            gathered: the layers with statistics in this step, the same on all ranks.
            for_now: other layers that fall back until the end of the step only.
        """
        lacking = self._curvature.layers_without_statistics()
        missing = [layer for layer in lacking if layer not in gathered]
        if not missing:
            return
        # 0: without a gradient; 1: with gradients of zero; 2: with others
        found = dict.fromkeys(missing, 0.0)
        for name, gradient in gradients.items():
            layer = self._whole.layer_of[name][0] if name in self.plan.layer_of else None
            if layer in found:
                found[layer] = max(found[layer], 1.0 + bool(gradient.any()))
        largest = dict(zip(missing, self._reducer.largest(list(found.values())), strict=True))
        fallen = [layer for layer in missing if largest[layer] > 0]
        if fallen:
            self.restore([*self._layers, *fallen])
            lasting = [layer for layer in fallen if largest[layer] > 1 and layer not in for_now]
            self._for_now = [layer for layer in fallen if layer not in lasting]
            if lasting and self._reducer.rank == 0:
                self._warn(lasting)

    def parameters_for_now(self) -> set[str]:
        """Return the parameters of layers that get their curvature back at the end of the step."""
        return self._parameters_of(self._for_now)

    def _parameters_of(self, layers: Collection[str]) -> set[str]:
        return {name for name, (layer, *_) in self._whole.layer_of.items() if layer in layers}

    def end_step(self) -> None:
        """Return the layers to curvature that have lost it for this step only."""
        if self._for_now:
            self.restore([layer for layer in self._layers if layer not in self._for_now])

    def restore(self, layers: Sequence[str]) -> None:
        """Let exactly these layers have no curvature."""
        self._layers, self._for_now = list(layers), []
        self.plan = self.plan_without(layers)
        self.parameters = set(self._whole.layer_of) - set(self.plan.layer_of)
        self._curvature.restrict(self.plan)

    def plan_without(self, layers: Collection[str]) -> Plan:
        return self._whole.without(dict.fromkeys(layers, REASON))

    def _warn(self, layers: Sequence[str]) -> None:
        sizes = {n: p.numel() for n, p in self._model.named_parameters() if p.requires_grad}
        own = sum(sizes.get(name, 0) for name in self._parameters_of(layers))
        share = own / sum(sizes.values())
        shown = ", ".join(map(repr, layers[:MOST_NAMES]))
        more = f" and {len(layers) - MOST_NAMES} more" if len(layers) > MOST_NAMES else ""
        what = f"layers {shown}{more} have" if len(layers) > 1 else f"layer {shown} has"
        warnings.warn(
            f"{what} a gradient, but no statistics, and {share:.1%} of the trained weights. "
            "They have no curvature from now on. Their modules did not run, or did not reach an "
            "output, in a training-mode forward pass of the model itself. Call modules instead of "
            "using their weights, call the model rather than its parts, and have output= return "
            "every tensor that the loss is computed from; or exclude the layers, "
            'groups=[{"prefix": ..., "treatment": "plain"}]',
            stacklevel=2,
        )

    # Checkpoints

    def state_dict(self) -> list[str]:
        return list(self._layers)

    def check_state(self, state: object) -> None:
        """Raise ``ValueError`` unless the state is a list of layers of this model."""
        what = "the state's layers without_statistics"
        require_names(what, state, list(self._whole.layers))
