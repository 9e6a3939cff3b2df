"""Independent dense references in float64, computed by differentiation instead of formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

Loss = Callable[[Tensor], Tensor]


def receptive_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the rows that the layer multiplies by its matrix.

    They are (groups, examples · |T|, (1 +) J|D|). The layer is linear in its parameters, so that
    they are its Jacobian in one output map's row of the matrix (bias, weight).
    """
    groups = getattr(module, "groups", 1)
    transposed = "Transpose" in type(module).__name__
    state = {name: p.detach() for name, p in module.named_parameters()}

    def output_of(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, parameters, (inputs,))

    example = output_of(state)
    maps = example.shape[-1] if isinstance(module, nn.Linear) else example.shape[1]
    rows = []
    for group in range(groups):
        channel = group * maps // groups

        def one_map(parameters: dict[str, Tensor], channel: int = channel) -> Tensor:
            output = output_of(parameters)
            if isinstance(module, nn.Linear):
                return output[..., channel].flatten()
            return output[:, channel].flatten()

        jacobian = jacrev(one_map)(state)
        if isinstance(module, nn.Linear) or not transposed:
            weight = jacobian["weight"][:, channel].flatten(1)
        else:
            per_group = module.in_channels // groups
            inside = slice(group * per_group, (group + 1) * per_group)
            weight = jacobian["weight"][:, inside, channel % (maps // groups)].flatten(1)
        bias = [jacobian["bias"][:, channel, None]] if "bias" in jacobian else []
        rows.append(torch.cat([*bias, weight], dim=1))
    return torch.stack(rows)


def activation_factor(module: nn.Module, inputs: Tensor, examples: int | None = None) -> Tensor:
    rows = receptive_rows(module, inputs)
    return rows.mT @ rows / (examples or inputs.shape[0])


def output_hessian(loss: Loss, outputs: Tensor) -> Tensor:
    """Return R, the Hessian of the loss in the flattened outputs."""
    hessian = torch.autograd.functional.hessian(loss, outputs.detach())
    return hessian.reshape(outputs.numel(), outputs.numel())


def fisher_in(function: Callable[[Tensor], Tensor], point: Tensor, loss: Loss) -> Tensor:
    """Return JᵀRJ of loss(function(point)) in the flattened point."""
    outputs = function(point)
    jacobian = torch.autograd.functional.jacobian(function, point.detach())
    jacobian = jacobian.reshape(outputs.numel(), point.numel())
    return jacobian.T @ output_hessian(loss, outputs) @ jacobian


def derivative_factor(
    rest: Callable[[Tensor], Tensor],
    pre_activations: Tensor,
    loss: Loss,
    groups: int = 1,
    channels_last: bool = False,
) -> Tensor:
    """Return Γ: the diagonal blocks of JᵀRJ, mean over locations, summed over examples.

    Pre-activations are (N, I, *T), or (N, *T, I) with ``channels_last``; the loss is already
    divided by the number of examples.
    """
    fisher = fisher_in(rest, pre_activations, loss)
    shape = pre_activations.shape
    index = torch.arange(pre_activations.numel()).reshape(shape)
    if channels_last:
        by_location = index.reshape(-1, shape[-1])
        locations = by_location.shape[0] // shape[0]
    else:
        by_location = index.flatten(2) if index.dim() > 2 else index.unsqueeze(2)
        locations = by_location.shape[2]
        by_location = by_location.transpose(1, 2).reshape(-1, shape[1])
    blocks = []
    for members in by_location.chunk(groups, dim=1):
        total = sum(fisher[row][:, row] for row in members)
        blocks.append(total / locations)
    return torch.stack(blocks)


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def function_of_parameters(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the outputs as a function of all parameters in one vector."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        state = {n: part.reshape(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, {**state, **copy.deepcopy(buffers)}, (inputs,))

    return outputs


def exact_fisher(model: nn.Module, inputs: Tensor, loss: Loss) -> Tensor:
    """Return F = JᵀRJ in all parameters."""
    return fisher_in(function_of_parameters(model, inputs), flat_parameters(model), loss)


def cross_entropy(reduction: str = "mean") -> Loss:
    """Return a cross-entropy; its Hessian in the outputs does not depend on the targets."""

    def loss(outputs: Tensor) -> Tensor:
        targets = torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.long)
        if reduction == "batchmean":
            return F.cross_entropy(outputs, targets, reduction="sum") / outputs.shape[0]
        return F.cross_entropy(outputs, targets, reduction=reduction)

    return loss


def fitting_loss(outputs: Tensor) -> Tensor:
    """Return a mean cross-entropy for outputs (N, C, ...), with targets of all classes in turn."""
    terms = outputs.numel() // outputs.shape[1]
    targets = torch.arange(terms, device=outputs.device) % outputs.shape[1]
    return F.cross_entropy(outputs, targets.reshape(outputs.shape[0], *outputs.shape[2:]))


def squared_error(outputs: Tensor) -> Tensor:
    return F.mse_loss(outputs, torch.zeros_like(outputs))


def binary_cross_entropy(outputs: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, torch.zeros_like(outputs))


class Affine(nn.Module):
    """An invertible affine map of the channels at every location."""

    def __init__(self, matrix: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.matrix, self.offset = matrix, offset

    def forward(self, maps: Tensor) -> Tensor:
        offset = self.offset.reshape(-1, *[1] * (maps.dim() - 2))
        return torch.einsum("ij,nj...->ni...", self.matrix, maps) + offset


def small_net() -> nn.Sequential:
    """Return a network with a convolution, batch normalisation and an in-place nonlinearity."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def small_batch(size: int = 8) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels for ``small_net``."""
    return torch.randn(size, 1, 6, 6), torch.randint(3, (size,))
