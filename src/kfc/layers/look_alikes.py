"""Modules of unknown types that compute what a known layer computes, found by running them.

A copy of the module with random parameters runs on small random inputs, and its outputs are
compared with those of each formula that its weight may belong to. The module itself, its hooks and
the global random state are not touched.
"""

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from kfc.layers.affine import AffineLastLayer, AffineSecondLayer, affine_parts, bare_copy
from kfc.layers.base import Layer, LinearLayer, TransposedLinearLayer
from kfc.layers.convolution import (
    ConvolutionLayer,
    SameConvolutionLayer,
    TransposedConvolutionLayer,
    pad_same,
)
from kfc.layers.functions import FUNCTIONS, arguments_of, is_call_of
from kfc.layers.standardised import (
    StandardisedConvolutionLayer,
    StandardisedSameConvolutionLayer,
    gain_of,
    standardised,
)

# The largest difference from the formula, relative to the largest output; probes are in float32.
TOLERANCE = 1e-4

METHODS = ("forward", "_conv_forward")
CONVOLUTIONS: tuple[type[_ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[_ConvNd], ...] = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Candidate(NamedTuple):
    """A layer class that may describe a module.

    Attributes:
        layer: the class, or a function that makes a layer of a module.
        shapes: the shapes of the inputs to compare on.
        formula: computes what such a layer computes, from the module and its inputs.
        sizes: factors of the weight to compare with.
    """

    layer: Callable[[Any], Layer]
    shapes: tuple[tuple[int, ...], ...]
    formula: Callable[[Any, Tensor], Tensor]
    sizes: tuple[float, ...] = (1.0,)


class Found(NamedTuple):
    """What makes the layer of a module, and whether its calls are those of a function."""

    layer: Callable[[Any], Layer]
    functional: bool


# What was found for a module, if anything, with the configuration that it was found for.
_found: WeakKeyDictionary[nn.Module, tuple[object, Found | None]] = WeakKeyDictionary()


def look_alike(module: nn.Module, stock: type[Layer] | None = None) -> Layer | None:
    """Return the layer that computes what the module computes, or ``None`` if none is found.

    The module is run once, unless its configuration changes; a frozen one is not run at all.

    Args:
        stock: the layer class of the type that the module's is derived from. It is returned if the
            module calls the function of that type, as ``F.batch_norm``, and does more than that.
    """
    parameters = {role: p for role, p in module._parameters.items() if p is not None}
    configuration = type(module), [(role, p.shape) for role, p in parameters.items()]
    known = _found.get(module)
    if known is None or known[0] != configuration:
        if not any(p.requires_grad for p in parameters.values()):
            return None
        known = configuration, _search(module, stock) if _can_be_run(module) else None
        _found[module] = known
    if known[1] is None:
        return None
    layer = known[1].layer(module)
    if known[1].functional:
        layer.use_function()
    return layer


def is_look_alike(module: nn.Module) -> bool:
    """Return whether the layer of a module was found by running it."""
    return module in _found and _found[module][1] is not None


def _can_be_run(module: nn.Module) -> bool:
    """Return whether one argument and known parameters decide about the module's output.

    These are a weight, a bias and, in a convolution, a gain.
    """
    own = {role for role, p in module._parameters.items() if p is not None}
    others = [p for child in module.children() for p in child.parameters()]
    known = {"weight", "bias", gain_of(module) if isinstance(module, _ConvNd) else None}
    if others or not {"weight"} <= own <= known:
        return False
    # Methods that were replaced belong to the module itself, not to a copy of it.
    attributes = module.__dict__.items()
    if any(k in METHODS or getattr(v, "__self__", None) is module for k, v in attributes):
        return False
    # A SyncBatchNorm would wait for other processes.
    if isinstance(module, (torch.jit.ScriptModule, nn.SyncBatchNorm)):
        return False
    try:
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return False
    if isinstance(module, nn.Embedding):  # whatever finds the indices: the lookup is what counts
        return True
    # ConvTranspose*d has a second one, which only changes the size of the output.
    return len(arguments) == 1 or arguments[1:] == ["output_size"]


def _search(module: nn.Module, stock: type[Layer] | None) -> Found | None:
    """Return the layer of the first candidate whose formula the module computes, in both modes.

    Otherwise return that of the class that ``look_alike()`` was called with, if it fits.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    with _without_traces():
        try:
            probe = _probe(module, generator)
        except Exception:  # a module that cannot be copied
            return None
        candidates = _candidates(probe)
        found = [each.layer for each in candidates if _computes(probe, each, generator)]
        if {AffineLastLayer, AffineSecondLayer} <= set(found):
            return None  # the place of the channels depends on the inputs
        if found:
            return Found(found[0], functional=False)
        if stock is not None and _calls_function(probe, stock(probe), generator):
            return Found(stock, functional=True)
    return None


class _Watch(TorchFunctionMode):
    """Counts the calls of a layer's function, with its parameters."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.calls, self._layer = 0, layer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in FUNCTIONS:
            self.calls += is_call_of(self._layer, func, arguments_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _calls_function(probe: nn.Module, layer: Layer, generator: torch.Generator) -> bool:
    """Return whether a module calls its layer's function, once in each mode."""
    shapes = _input_shapes(probe)
    for shape in shapes:
        inputs = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        if isinstance(probe, nn.Embedding):
            inputs = torch.ones(shape, dtype=torch.long, device="cpu")  # an index, or a mask
        for training in (True, False):
            probe.train(training)
            try:
                with _Watch(layer) as watch:
                    type(probe).forward(probe, inputs.clone())
            except Exception:  # inputs that the module does not accept
                return False
            if watch.calls != 1:
                return False
    return bool(shapes)


# The sizes of the maps that batch normalisation is run on.
MAPS = {nn.BatchNorm1d: (5,), nn.BatchNorm2d: (5, 6), nn.BatchNorm3d: (3, 4, 5)}


def _input_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return shapes of inputs that a type of module accepts."""
    if isinstance(module, nn.Embedding):
        return ((2, 1),)
    if isinstance(module, nn.Linear):
        return (5, 3, module.in_features), (16, module.in_features)
    if isinstance(module, _ConvNd):
        extents = zip(module.kernel_size, module.dilation, strict=True)
        sizes = [d * (k - 1) + 1 for k, d in extents]
        # Two sizes, so that the padding of "same" differs for most strides
        return tuple(
            (2, module.in_channels, *(n + i + more for i, n in enumerate(sizes))) for more in (1, 2)
        )
    kinds = [kind for kind in MAPS if isinstance(module, kind)]
    return tuple((4, cast(_BatchNorm, module).num_features, *MAPS[kind]) for kind in kinds)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Compute without gradients and autocast, and restore the random state."""
    state = random.getstate()
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        try:
            yield
        finally:
            random.setstate(state)


def _candidates(module: nn.Module) -> Iterator[Candidate]:
    """Yield the layers that the module's type and the shape of its weight allow."""
    shape = tuple(module._parameters["weight"].shape)  # type: ignore[union-attr]
    if isinstance(module, _ConvNd):
        yield from _convolutions(module)
    elif isinstance(module, nn.Embedding):
        return
    elif len(shape) == 2:
        yield Candidate(LinearLayer, ((5, 3, shape[1]), (16, shape[1])), _linear)
        yield Candidate(TransposedLinearLayer, ((5, 3, shape[0]), (16, shape[0])), _transposed)
    elif len(shape) == 1 and shape[0] > 1:
        yield from _affine_candidates(*shape)


def _affine_candidates(channels: int) -> Iterator[Candidate]:
    """Yield candidates for inputs of three and of four dimensions."""
    # No other dimension has the size of the channels.
    first, second, third = (n + (n >= channels) for n in (4, 5, 6))
    for rest in ((second,), (second, third)):
        last, middle = (first, *rest, channels), (first, channels, *rest)
        yield Candidate(AffineLastLayer, (last,), partial(_affine, axis=-1))
        yield Candidate(AffineSecondLayer, (middle,), partial(_affine, axis=1))


def _affine(module: nn.Module, inputs: Tensor, axis: int) -> Tensor:
    """Return scale · x̂ + shift + rest with the channels in a dimension.

    Examples are processed one by one, so that a module that mixes them is recognised; that is
    expected of batch normalisation only.
    """
    parts = affine_parts(module)
    batches = (inputs,) if isinstance(module, _BatchNorm) else inputs.split(1)
    normalised, rest = map(torch.cat, zip(*map(parts, batches), strict=True))
    by_channel = normalised.movedim(axis, -1) * cast(Tensor, module._parameters["weight"])
    assert by_channel.shape[-1] == normalised.shape[axis]  # no dimension was expanded
    bias = module._parameters.get("bias")
    by_channel = by_channel if bias is None else by_channel + bias
    return by_channel.movedim(-1, axis) + rest


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return F.linear(inputs, module.weight, module._parameters.get("bias"))


def _transposed(module: nn.Linear, inputs: Tensor) -> Tensor:
    bias = module._parameters.get("bias")
    return inputs @ module.weight if bias is None else inputs @ module.weight + bias


def _convolutions(module: _ConvNd) -> Iterator[Candidate]:
    is_transposed = isinstance(module, _ConvTransposeNd)
    stock = TRANSPOSED if is_transposed else CONVOLUTIONS
    base = next((kind for kind in stock if isinstance(module, kind)), None)
    if base is None:
        return
    shapes = _input_shapes(module)
    layer = TransposedConvolutionLayer if is_transposed else ConvolutionLayer
    yield Candidate(layer, shapes, base.forward)
    if is_transposed:
        return
    yield Candidate(SameConvolutionLayer, shapes, lambda m, x: _same(m, x, m.weight, m.bias))
    if module.weight[0].numel() > 2:  # two entries are always constants when standardised
        yield from _standardised(module, base._conv_forward, StandardisedConvolutionLayer)
        yield from _standardised(module, _same, StandardisedSameConvolutionLayer)


def _same(module: _ConvNd, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    function = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]
    padded = pad_same(inputs, module.kernel_size, module.stride, module.dilation)
    return function(padded, weight, bias, module.stride, 0, module.dilation, module.groups)


def _standardised(
    module: _ConvNd,
    convolve: Callable[..., Tensor],
    layer: type[StandardisedConvolutionLayer],
) -> Iterator[Candidate]:
    """Yield a convolution with the standardised weight, with the κ and ε that fit best.

    Args:
        convolve: computes the outputs from the module, its inputs, a weight and a bias.
    """
    shapes = _input_shapes(module)
    generator = torch.Generator("cpu").manual_seed(1)
    inputs = torch.randn(shapes[0], generator=generator, dtype=torch.float32, device="cpu")
    try:
        scale, epsilon = _fit_standardised(module, convolve, inputs)
    except Exception:  # inputs that the module does not accept, or outputs of another shape
        return

    def formula(module: _ConvNd, inputs: Tensor) -> Tensor:
        return convolve(module, inputs, scale * standardised(module, epsilon), module.bias)

    made = partial(layer, gain=gain_of(module), scale=scale, epsilon=epsilon)
    yield Candidate(made, shapes, formula, sizes=(1.0, 1e-2, 1e-4))


def _fit_standardised(
    module: _ConvNd, convolve: Callable[..., Tensor], inputs: Tensor
) -> tuple[float, float]:
    """Return κ and ε, from the outputs r of every map relative to those with κ = 1 and ε = 0.

    With a row of the weight of variance v, multiplied by t, r = κ / √(1 + ε/(t²v)). So two sizes t
    of the weight tell both numbers.
    """
    unit, small = standardised(module), 1e-5
    plain = convolve(module, inputs, unit, None)
    shift = convolve(module, inputs, torch.zeros_like(unit), module.bias)

    def ratios(size: float) -> Tensor:
        with _weight_times(module, size):
            outputs = type(module).forward(module, inputs.clone()) - shift
        own, other = (maps.transpose(0, 1).flatten(1) for maps in (outputs, plain))
        result: Tensor = (own * other).sum(1) / other.square().sum(1)
        return result

    variances = module.weight.flatten(1).var(1, unbiased=False)
    usual, tiny = ratios(1.0), ratios(small)
    change = usual.square() - tiny.square()
    epsilons = variances * change / ((tiny / small).square() - usual.square())
    epsilon = epsilons.median().clamp_min(0).item()
    return (usual * (1 + epsilon / variances).sqrt()).median().item(), epsilon


@contextmanager
def _weight_times(module: nn.Module, factor: float) -> Iterator[None]:
    weight = module.get_parameter("weight")
    before = weight.clone()
    weight.mul_(factor)
    try:
        yield
    finally:
        weight.copy_(before)


def _computes(probe: nn.Module, candidate: Candidate, generator: torch.Generator) -> bool:
    for shape, size in itertools.product(candidate.shapes, candidate.sizes):
        inputs = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for training in (True, False):
            probe.train(training)
            try:
                with _weight_times(probe, size):
                    expected = candidate.formula(probe, inputs)
                    # Not the call of the module, which would run hooks
                    outputs = type(probe).forward(probe, inputs.clone())
            except Exception:  # inputs that the module does not accept
                return False
            if not isinstance(outputs, Tensor) or outputs.shape != expected.shape:
                return False
            difference = (outputs - expected).abs().max()
            if not difference <= TOLERANCE * expected.abs().max():
                return False
    return True


def _probe(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy of a module on the CPU in float32, with random parameters.

    They are random because initial values such as zero would hide what the module computes.
    """
    parameters: dict[str, nn.Parameter | None] = {}
    for role, parameter in module._parameters.items():
        if parameter is None:
            parameters[role] = None
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameters[role] = nn.Parameter(values.uniform_(-1, 1, generator=generator))
    probe = bare_copy(module)
    vars(probe).update(_parameters=parameters)
    return probe.to("cpu", torch.float32)
