"""Products with the exact Fisher matrix F = JᵀRJ of a batch, by forward-mode differentiation.

Where an operation of the model has no forward mode, derivatives come from two backward passes.

J is the Jacobian of the model's outputs in its parameters, R the Hessian of the loss in the outputs
(see ``kfc.fisher.likelihoods`` for its scale). Each product runs the model once, in its current
mode (training or evaluation). Buffers, gradients and the global random state are left unchanged,
and dropout draws the mask that the next forward pass would draw.

Where ``torch.nn.SyncBatchNorm`` joins the batches of several ranks, all of them must compute
the product together; their results add up to the product for the sum of their losses.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from kfc._helpers import forward_level, load_decompositions, make_dual, widest
from kfc.distributed.synchronised import normalise_over_ranks, synchronising_group
from kfc.fisher.calls import (
    ModelCall,
    accelerators_of,
    call_of,
    forked_random_state,
    suspended,
    without_autocast,
)
from kfc.fisher.compiled import eagerly
from kfc.fisher.double_backward import SecondDerivativeError, changes_along
from kfc.fisher.heads import LikelihoodChoice, Output, resolve_likelihoods, select_outputs
from kfc.fisher.likelihoods import Likelihood, Weights

Vector = TypeVar("Vector", Mapping[str, Tensor], Sequence[Tensor])

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


# The models that have an operation without forward mode.
_WITHOUT_FORWARD_MODE: WeakSet[nn.Module] = WeakSet()

# The selected outputs by name, each with its derivative along a vector.
Heads = dict[str, tuple[Tensor, Tensor]]


class ForwardModeError(RuntimeError):
    """Raised if an operation of the model has no forward-mode derivative."""


class ProductError(RuntimeError):
    """Raised if exact Fisher products of a model cannot be computed."""


def vector_product(
    model: nn.Module,
    inputs: Any,
    vector: Vector,
    *,
    likelihood: LikelihoodChoice = "categorical",
    output: Output | None = None,
) -> Vector:
    """Return the product F v with the exact Fisher matrix.

    Args:
        model: any module, called as ``model(inputs)``, as ``model(*inputs)`` for a tuple and as
            ``model(**inputs)`` for a dict.
        inputs: one batch.
        vector: v, a dict from parameter names to tensors (missing parameters count as zero), or a
            list in the order of ``model.parameters()``, with an entry for every parameter or for
            every parameter that requires gradients.
        likelihood: the distribution that the outputs parametrise; see ``kfc.Likelihood``. If
            the loss is a sum of losses of several outputs, a dict with the likelihood of each.
        output: selects the tensor of outputs, or a dict of them, from what the model returns.

    Returns:
        F v in the structure of ``vector``, for the parameters in it.
    """
    tangents = by_name(model, vector)
    parameters = dict(model.named_parameters())
    leaves = {name: parameters[name].detach().requires_grad_() for name in tangents}
    likelihoods = resolve_likelihoods(likelihood)
    with torch.enable_grad():
        select = partial(select_outputs, output=output, names=list(likelihoods))
        (heads,) = _runs(model, call_of(model, inputs), [tangents], leaves, select)
        pulled = []
        for name, (outputs, change) in heads.items():
            likelihoods[name].validate(outputs)
            product = likelihoods[name].fisher_product(outputs.detach(), change.detach())
            pulled.append(product.to(outputs.dtype))
        try:
            products = torch.autograd.grad(
                [outputs for outputs, _ in heads.values()],
                list(leaves.values()),
                pulled,
                materialize_grads=True,
            )
        except CheckpointError as error:
            raise RuntimeError(
                "vector_product cannot go backward through torch.utils.checkpoint, which runs the "
                "model again without its tangents; turn checkpointing off for it"
            ) from error
    filled = {name: product.detach() for name, product in zip(leaves, products, strict=True)}
    if isinstance(vector, Mapping):
        return filled  # type: ignore[return-value]
    return type(vector)(filled.values())  # type: ignore[call-arg]


def quadratic_form(
    model: nn.Module,
    inputs: Any,
    vector: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    likelihood: LikelihoodChoice = "categorical",
    output: Output | None = None,
) -> Tensor:
    """Return vᵀ F v, exactly, with one forward pass; arguments as in ``vector_product``."""
    call, vectors = call_of(model, inputs), [by_name(model, vector)]
    products, _ = products_of_call(model, call, vectors, resolve_likelihoods(likelihood), output)
    return products[0, 0]


def products_of_call(
    model: nn.Module,
    call: ModelCall,
    vectors: Sequence[Mapping[str, Tensor]],
    likelihoods: Mapping[str, Likelihood],
    output: Output | None,
    weights: Callable[[str, Tensor], Weights] | None = None,
) -> tuple[Tensor, int]:
    """Return all vᵢᵀFvⱼ, (k, k), on a recorded forward pass, and the number of its examples.

    This takes one forward pass per vector.

    Args:
        likelihoods: the likelihood of each output, by name.
        weights: returns the weights of the terms of an output, given its name and values.
    """
    select = partial(select_outputs, output=output, names=list(likelihoods))
    changes, pulled, examples = [], [], 0
    with torch.no_grad():
        for heads in _runs(model, call, vectors, {}, select):
            products = []
            for name, (outputs, change) in heads.items():
                likelihoods[name].validate(outputs)
                examples = len(outputs)
                own = None if weights is None else weights(name, outputs)
                products.append(likelihoods[name].fisher_product(outputs, change, own))
            changes.append(_flattened([change for _, change in heads.values()]))
            pulled.append(_flattened(products))
        with without_autocast(changes[0].device):
            return torch.stack(changes) @ torch.stack(pulled).mT, examples


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector; in the widest dtype, because squares of changes may overflow float32."""
    return torch.cat([tensor.flatten().to(widest(tensor.device)) for tensor in tensors])


def _runs(
    model: nn.Module,
    call: ModelCall,
    vectors: Sequence[Mapping[str, Tensor]],
    leaves: Mapping[str, Tensor],
    select: Callable[[Any], dict[str, Tensor]],
) -> list[Heads]:
    """Return the selected outputs with their derivatives, along each vector.

    ``leaves`` are the parameters to differentiate with respect to afterwards. Operations without
    forward mode are found once for each model.
    """
    if model in _WITHOUT_FORWARD_MODE:
        return _double_runs(model, call, vectors, leaves, select)
    try:
        shared = _SharedOutputs(len(vectors))
        return [_dual_run(model, call, vector, leaves, select, shared) for vector in vectors]
    except ForwardModeError as error:
        found = _double_runs(model, call, vectors, leaves, select)
        if "Nested" not in str(error):  # which is a matter of other levels, not of the model
            _WITHOUT_FORWARD_MODE.add(model)
            warnings.warn(
                "an operation of this model has no forward-mode derivative, so that exact Fisher "
                f"products take two backward passes instead: {error}",
                stacklevel=2,
            )
        return found


def _dual_run(
    model: nn.Module,
    call: ModelCall,
    tangents: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    select: Callable[[Any], dict[str, Tensor]],
    shared: "_SharedOutputs",
) -> Heads:
    """Return the selected outputs with their derivatives along the tangents, by forward mode."""
    state: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with _conditions(model, call), forward_level(), _Convolutions(shared):
            for name, parameter in model.named_parameters():
                primal = leaves.get(name, parameter.detach())
                tangent = tangents.get(name)
                state[name] = primal if tangent is None else make_dual(primal, tangent.to(primal))
            result = functional_call(model, state, call.args, call.kwargs)
            # Leaving the level removes the tangents from the graph, so a backward is a plain one.
            return {name: _unpacked(outputs) for name, outputs in select(result).items()}
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in ("forward AD", "forward mode AD")):
            raise
        if "Nested" not in str(error) and load_decompositions():
            return _dual_run(model, call, tangents, leaves, select, shared)
        raise ForwardModeError(str(error).splitlines()[0]) from error


def _double_runs(
    model: nn.Module,
    call: ModelCall,
    vectors: Sequence[Mapping[str, Tensor]],
    leaves: Mapping[str, Tensor],
    select: Callable[[Any], dict[str, Tensor]],
) -> list[Heads]:
    """Return the selected outputs with their derivatives, by two backward passes."""
    state: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = dict.fromkeys(name for vector in vectors for name in vector)
    leaves = leaves or {name: parameters[name].requires_grad_() for name in names}
    state |= {**parameters, **leaves}
    with _conditions(model, call), torch.enable_grad():
        outputs = select(functional_call(model, state, call.args, call.kwargs))
        try:
            changes = changes_along(outputs, leaves, vectors)
        except SecondDerivativeError as error:
            raise ProductError(
                "exact Fisher products need forward-mode or second derivatives, and an operation "
                f"of this model has neither: {error}"
            ) from error
    return [{name: (outputs[name], own[name]) for name in outputs} for own in changes]


def _unpacked(outputs: Tensor) -> tuple[Tensor, Tensor]:
    primal, change = forward_ad.unpack_dual(outputs)
    return primal, torch.zeros_like(primal) if change is None else change.clone()


@contextmanager
def _conditions(model: nn.Module, call: ModelCall) -> Iterator[None]:
    """Repeat the conditions of a recorded pass, with operations that can be differentiated."""
    device = next(model.parameters()).device.type
    with (
        suspended(),
        eagerly(),
        forked_random_state(accelerators_of(model), call.random_state),
        _attention_with_forward_mode(),
        _synchronised_with_forward_mode(model),
        # As in the recorded pass, whether autocast is on or off now.
        torch.autocast(device, call.autocast, enabled=call.autocast is not None),
    ):
        yield


class _SharedOutputs:
    """The outputs of the convolutions of one run, for the next run with other tangents.

    Runs have the same parameters, inputs and random numbers, so that only tangents differ. Should a
    model do something else in the next run, or have changed an output in place, its convolutions
    are computed anew.
    """

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._known: list[tuple[object, Tensor, int]] = []

    def next_run(self) -> Callable[[object, Callable[[], Tensor]], Tensor]:
        """Return a function of what identifies a convolution, and of the convolution."""
        known, self._known = iter(self._known), []
        self._runs -= 1

        def outputs(key: object, convolve: Callable[[], Tensor]) -> Tensor:
            before, result, version = next(known, (None, None, 0))
            if result is None or before != key or result._version != version:
                result = convolve()
            if self._runs:
                self._known.append((key, result, result._version))
            return result

        return outputs


class _Convolutions(TorchFunctionMode):
    """Compute convolutions of dual numbers with as few convolutions as possible.

    torch would convolve the zero tangents of data too, a third of the work of the first layer,
    whose maps are the largest; and it would repeat what does not depend on the tangents.
    """

    def __init__(self, shared: _SharedOutputs) -> None:
        super().__init__()
        self._outputs = shared.next_run()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CONVOLUTIONS or len(args) < 3:
            return func(*args, **kwargs)
        inputs, weight, bias = (_primal_and_tangent(tensor) for tensor in args[:3])
        if weight[1] is None:
            return func(*args, **kwargs)

        def convolve(x: Tensor | None, w: Tensor | None, b: Tensor | None) -> Tensor:
            return func(x, w, b, *args[3:], **kwargs)  # type: ignore[no-any-return]

        key = args[0].shape, args[1].data_ptr()
        outputs = self._outputs(key, lambda: convolve(inputs[0], weight[0], bias[0]))
        with torch.no_grad():
            change = convolve(inputs[0], weight[1], bias[1])
            if inputs[1] is not None:
                change += convolve(inputs[1], weight[0], None)
        return make_dual(outputs, change)


def _primal_and_tangent(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if tensor is None else forward_ad.unpack_dual(tensor)


@contextmanager
def _attention_with_forward_mode() -> Iterator[None]:
    """Disable the fused attention kernels and encoder layers, which have no forward mode."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _synchronised_with_forward_mode(model: nn.Module) -> Iterator[None]:
    """Replace torch's batch normalisation over several ranks, which has no forward mode.

    Subclasses with a forward of their own are left as they are.
    """
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


def by_name(model: nn.Module, vector: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a vector as a dict from parameter names to tensors, after checking its shapes."""
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
