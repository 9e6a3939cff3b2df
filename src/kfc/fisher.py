"""Products with the exact Fisher matrix F = JᵀRJ of a batch, by forward-mode differentiation.

J is the Jacobian of the model's outputs in its parameters, R the Hessian of the loss in the
outputs (see :mod:`kfc.likelihoods` for its scale). The model runs as it is, in training or in
evaluation mode, once per product; its buffers, gradients and the global random state stay as they
were, and dropout draws the mask that the next forward pass would draw.

Where :class:`torch.nn.SyncBatchNorm` joins the batches of several ranks, these ask for a product
together, and what they get adds up to the product for the sum of their losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from kfc.capture import ModelCall, suspended
from kfc.checks import widest
from kfc.layers.synchronised import normalise_over_ranks, synchronising_group
from kfc.likelihoods import Likelihood, resolve_likelihood
from kfc.randomness import accelerators_of, forked_random_state, set_random_state
from kfc.session import without_autocast

Output = Callable[[Any], Tensor]
P = ParamSpec("P")
T = TypeVar("T")
Vector = TypeVar("Vector", Mapping[str, Tensor], Sequence[Tensor])


CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class ForwardModeError(RuntimeError):
    """An operation of the model has no forward-mode derivative."""


def vector_product(
    model: nn.Module,
    inputs: Any,
    vector: Vector,
    *,
    likelihood: str | Likelihood = "categorical",
    output: Output | None = None,
) -> Vector:
    """F v, exactly.

    Args:
        model: any module; it is called as ``model(inputs)``, ``model(*inputs)`` for a tuple and
            ``model(**inputs)`` for a dict.
        inputs: one batch.
        vector: v, a dict from parameter names to tensors (parameters left out count as zero), or a
            list in the order of ``model.parameters()``, of all or of those that require gradients.
        likelihood: what the outputs parametrise; see :class:`kfc.Likelihood`.
        output: picks the tensor of outputs from what the model returns.

    Returns:
        F v in the structure of ``vector``, for the parameters in it.
    """
    tangents = _by_name(model, vector)
    parameters = dict(model.named_parameters())
    leaves = {name: parameters[name].detach().requires_grad_() for name in tangents}
    distribution = resolve_likelihood(likelihood)
    with torch.enable_grad():
        outputs, change = _dual_run(model, _call(inputs), tangents, leaves, output)
        distribution.validate(outputs)
        pulled = distribution.fisher_product(outputs.detach(), change.detach())
        try:
            products = torch.autograd.grad(
                outputs, list(leaves.values()), pulled.to(outputs.dtype), allow_unused=True
            )
        except CheckpointError as error:
            raise RuntimeError(
                "vector_product cannot go backward through torch.utils.checkpoint, which runs the "
                "model again without its tangents; turn checkpointing off for it"
            ) from error
    filled = [
        torch.zeros_like(leaf) if product is None else product.detach()
        for leaf, product in zip(leaves.values(), products, strict=True)
    ]
    return _like(vector, dict(zip(leaves, filled, strict=True)))


def quadratic_form(
    model: nn.Module,
    inputs: Any,
    vector: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    likelihood: str | Likelihood = "categorical",
    output: Output | None = None,
) -> Tensor:
    """vᵀ F v, exactly, for one dual forward pass; arguments as in :func:`vector_product`."""
    products = products_of_call(
        model, _call(inputs), [_by_name(model, vector)], resolve_likelihood(likelihood), output
    )
    return products[0, 0]


def products_of_call(
    model: nn.Module,
    call: ModelCall,
    vectors: Sequence[Mapping[str, Tensor]],
    likelihood: Likelihood,
    output: Output | None,
) -> Tensor:
    """(k, k): vᵢᵀ F vⱼ on a recorded forward pass, for one dual forward pass per vector."""
    changes, pulled = [], []
    with torch.no_grad():
        for tangents in vectors:
            outputs, change = _dual_run(model, call, tangents, {}, output)
            likelihood.validate(outputs)
            # Squares of large changes may leave float32's range, which the caller wants to see.
            changes.append(change.flatten().to(widest(change.device)))
            pulled.append(likelihood.fisher_product(outputs, change).flatten().to(changes[-1]))
        with without_autocast(changes[0].device):
            return torch.stack(changes) @ torch.stack(pulled).mT


def _with_decompositions_if_needed(run: Callable[P, T]) -> Callable[P, T]:
    """Try again with them if an operation turns out to lack a forward mode of its own."""

    @wraps(run)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except ForwardModeError:
            if _decompositions_are_loaded():
                raise
            _load_decompositions()
        return run(*args, **kwargs)

    return attempt


@_with_decompositions_if_needed
def _dual_run(
    model: nn.Module,
    call: ModelCall,
    tangents: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    output: Output | None,
) -> tuple[Tensor, Tensor]:
    """Run the model on dual parameters: the outputs, and how they change along the tangents."""
    state: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack:
        stack.enter_context(suspended())
        stack.enter_context(_random_state_of(call, model))
        stack.enter_context(forward_ad.dual_level())
        stack.enter_context(_attention_with_forward_mode())
        stack.enter_context(_synchronised_with_forward_mode(model))
        stack.enter_context(_WithoutZeroTangents())
        if call.autocast is not None:
            stack.enter_context(torch.autocast(call.autocast[0], dtype=call.autocast[1]))
        for name, parameter in model.named_parameters():
            primal = leaves.get(name, parameter.detach())
            tangent = tangents.get(name)
            state[name] = primal if tangent is None else _dual(primal, tangent.to(primal))
        result = _run(model, state, call)
        selected = select_output(result, output)
        outputs, change = forward_ad.unpack_dual(selected)
        # Leaving the level takes the tangents off the graph, so that a backward is a plain one.
        return outputs, torch.zeros_like(outputs) if change is None else change.clone()


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    # Not forward_ad.make_dual: its first call loads the decompositions below.
    dual: Tensor = torch._VF._make_dual(primal, tangent, level=forward_ad._current_level)
    return dual


def _decompositions_are_loaded() -> bool:
    return "torch._decomp.decompositions_for_jvp" in sys.modules


def _load_decompositions() -> None:
    """Forward mode for the few operations that have it by decomposition only.

    Loading them takes as long as a training step of a small network, and hardly a model needs one.
    """
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


class _WithoutZeroTangents(TorchFunctionMode):
    """Spares a convolution of data the tangent of its input, which is zero.

    torch would convolve those zeros all the same: a third of the work of a first layer, and the
    first layer's maps are the largest.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and len(args) >= 3:
            inputs, *learned = args[:3]
            weight, bias = (_primal_and_tangent(tensor) for tensor in learned)
            if weight[1] is not None and _primal_and_tangent(inputs)[1] is None:
                outputs = func(inputs, weight[0], bias[0], *args[3:], **kwargs)
                with torch.no_grad():
                    change = func(inputs, weight[1], bias[1], *args[3:], **kwargs)
                return _dual(outputs, change)
        return func(*args, **kwargs)


def _primal_and_tangent(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if tensor is None else forward_ad.unpack_dual(tensor)


def _run(model: nn.Module, state: dict[str, Tensor], call: ModelCall) -> Any:
    try:
        return functional_call(model, state, call.args, call.kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in ("forward AD", "forward mode AD")):
            raise
        raise ForwardModeError(
            "exact Fisher products need forward-mode differentiation, which an operation of this "
            f"model lacks: {str(error).splitlines()[0]} To train without them: KFC with "
            "fisher_clip=None."
        ) from error


def select_output(result: Any, output: Output | None) -> Tensor:
    """The tensor of outputs among what the model returned, or an error that says how to name it."""
    selected = result if output is None else output(result)
    if not isinstance(selected, Tensor):
        origin = "the model returned" if output is None else "output= returned"
        raise TypeError(
            f"{origin} a {type(selected).__name__}, not a tensor; pick the outputs that the loss "
            "is computed from, for instance output=lambda out: out.logits or "
            "output=lambda out: out[0]"
        )
    return selected


@contextmanager
def _attention_with_forward_mode() -> Iterator[None]:
    """Neither the fused attention kernels nor the fused encoder layers have a forward mode."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _synchronised_with_forward_mode(model: nn.Module) -> Iterator[None]:
    """torch's batch normalisation over several ranks has none; a subclass may have its own."""
    replaced = [
        module
        for module in model.modules()
        if isinstance(module, nn.SyncBatchNorm)
        and synchronising_group(module) is not None
        and getattr(module.forward, "__func__", None) is nn.SyncBatchNorm.forward
    ]
    for module in replaced:
        vars(module)["forward"] = partial(normalise_over_ranks, module)
    try:
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)


@contextmanager
def _random_state_of(call: ModelCall, model: nn.Module) -> Iterator[None]:
    """That in which the call was made, if it is known; it is as it was afterwards."""
    accelerators = accelerators_of(model)
    with forked_random_state(accelerators):
        if call.random_state is not None:
            set_random_state(call.random_state, accelerators)
        yield


def _call(inputs: Any) -> ModelCall:
    if isinstance(inputs, tuple):
        return ModelCall(inputs, {})
    if isinstance(inputs, Mapping):
        return ModelCall((), dict(inputs))
    return ModelCall((inputs,), {})


def _by_name(
    model: nn.Module, vector: Mapping[str, Tensor] | Sequence[Tensor]
) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    if isinstance(vector, Mapping):
        named = dict(vector)
        unknown = [name for name in named if name not in parameters]
        if unknown:
            raise ValueError(f"the vector names parameters that the model does not have: {unknown}")
    else:
        trained = [name for name, p in parameters.items() if p.requires_grad]
        names = list(parameters) if len(vector) == len(parameters) else trained
        if len(vector) != len(names):
            raise ValueError(
                f"the vector has {len(vector)} tensors, but the model has {len(parameters)} "
                f"parameters, {len(trained)} of them trained"
            )
        named = dict(zip(names, vector, strict=True))
    for name, tensor in named.items():
        if tensor.shape != parameters[name].shape:
            raise ValueError(
                f"the vector has shape {tuple(tensor.shape)} for parameter {name!r} of shape "
                f"{tuple(parameters[name].shape)}"
            )
    return named


def _like(vector: Vector, products: dict[str, Tensor]) -> Vector:
    if isinstance(vector, Mapping):
        return products  # type: ignore[return-value]
    return type(vector)(products.values())  # type: ignore[call-arg]
