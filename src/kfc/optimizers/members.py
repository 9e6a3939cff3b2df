"""The parameters of a model, watched for layers that are replaced in mid-training."""

import warnings
from collections.abc import Callable, Mapping
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kfc.distributed.sharding import refuse_sharded
from kfc.layers import Plan, find_layers
from kfc.optimizers.rescaling import Rescaling

# Called with the old and the new parameter.
OnReplacement = Callable[[nn.Parameter, nn.Parameter], None]


class Members:
    """The parameters of a model by name, and the layers that they belong to.

    Args:
        plan: the plan at construction, whose layers follow their modules.

    Attributes:
        rescaling: tells whether the gradients were clipped.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self.plan = model, plan
        self._known = {name: (p, p.shape) for name, p in model.named_parameters()}
        self._listener: WeakMethod[OnReplacement] | None = None
        self.rescaling = Rescaling(model)

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._known[name][0]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self.rescaling.close()

    def listen(self, listener: OnReplacement) -> None:
        """Report replaced parameters to a method, whose object is not kept alive."""
        self._listener = WeakMethod(listener)

    def gradients(self) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
        """Return the gradients of trained parameters, and the parameters that are not known yet."""
        found: dict[str, Tensor] = {}
        replaced: dict[str, nn.Parameter] = {}
        parameters = list(self._model.named_parameters())
        refuse_sharded(parameters)
        for name, parameter in parameters:
            if parameter.grad is None or not parameter.requires_grad:
                continue
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse; build its layer with sparse=False"
                )
            known = self._known.get(name)
            if known is None or known[0] is not parameter or known[1] != parameter.shape:
                replaced[name] = parameter
            found[name] = parameter.grad
        return found, replaced

    def adopt(self, found: Mapping[str, nn.Parameter]) -> set[str]:
        """Replace parameters by new ones of the same names and shapes.

        Returns:
            The layers whose modules were replaced.

        Raises:
            RuntimeError: if there are new names or other shapes; nothing is changed.
        """
        self._refuse_others(found)
        warnings.warn(
            f"the parameters {sorted(found)} were replaced since the last step. The new ones are "
            "trained from now on; momentum and averages of the old ones are dropped",
            stacklevel=2,
        )
        layers, moved = find_layers(self._model).layers, set()
        for name, layer in self.plan.layers.items():
            if layer.modules != layers[name].modules:
                layer.tie(layers[name].modules)
                moved.add(name)
        listener = None if self._listener is None else self._listener()
        for name, parameter in found.items():
            if listener is not None:
                listener(self[name], parameter)
            self._known[name] = parameter, parameter.shape
        self.rescaling.close()
        self.rescaling = Rescaling(self._model)
        return moved

    def _refuse_others(self, found: Mapping[str, nn.Parameter]) -> None:
        advice = "make a new optimizer for the changed model"
        for name, parameter in found.items():
            if name not in self._known:
                raise RuntimeError(
                    f"the parameter {name!r} was added to the model after its optimizer was made; "
                    f"{advice}"
                )
            shape = self._known[name][1]
            if shape != parameter.shape:
                raise RuntimeError(
                    f"the parameter {name!r} had shape {tuple(shape)} when the optimizer was made, "
                    f"and has {tuple(parameter.shape)} now; {advice}"
                )
        plan = find_layers(self._model)
        for name, layer in self.plan.layers.items():
            if type(plan.layers.get(name)) is not type(layer):
                kind = type(self._model.get_submodule(name)).__name__
                raise RuntimeError(
                    f"layer {name!r} was replaced by a {kind}, which is treated differently; "
                    f"{advice}"
                )
