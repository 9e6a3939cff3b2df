"""Which handler a module gets, and how every parameter of a model is treated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import singledispatch

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from kfc.layers.base import Handler
from kfc.layers.convolution import ConvolutionHandler, TransposedConvolutionHandler
from kfc.layers.factored import KroneckerHandler, LinearHandler
from kfc.layers.normalisation import (
    BatchNormHandler,
    GroupNormHandler,
    InstanceNormHandler,
    LayerNormHandler,
    RMSNormHandler,
)
from kfc.layers.structures import STRUCTURES


@dataclass(frozen=True)
class PlainGradient:
    """No Fisher block: the parameters follow their plain gradient, for this reason."""

    reason: str


@singledispatch
def handler_for(module: nn.Module) -> Handler | PlainGradient:
    """The handler of a module; register a function by module type to add one."""
    return PlainGradient(f"no handler for {type(module).__name__}")


@handler_for.register(nn.Linear)
def _(module: nn.Linear) -> Handler:
    return LinearHandler(module)


@handler_for.register(NonDynamicallyQuantizableLinear)
def _(module: nn.Module) -> PlainGradient:
    return PlainGradient("attention reads this weight without calling the module")


@handler_for.register(nn.Conv1d)
@handler_for.register(nn.Conv2d)
@handler_for.register(nn.Conv3d)
def _(module: nn.Module) -> Handler:
    return ConvolutionHandler(module)


@handler_for.register(nn.ConvTranspose1d)
@handler_for.register(nn.ConvTranspose2d)
@handler_for.register(nn.ConvTranspose3d)
def _(module: nn.Module) -> Handler:
    return TransposedConvolutionHandler(module)


@handler_for.register(nn.BatchNorm1d)
@handler_for.register(nn.BatchNorm2d)
@handler_for.register(nn.BatchNorm3d)
@handler_for.register(nn.SyncBatchNorm)
def _(module: nn.Module) -> Handler:
    return BatchNormHandler(module)


@handler_for.register(nn.InstanceNorm1d)
@handler_for.register(nn.InstanceNorm2d)
@handler_for.register(nn.InstanceNorm3d)
def _(module: nn.Module) -> Handler:
    return InstanceNormHandler(module)


@handler_for.register(nn.GroupNorm)
def _(module: nn.Module) -> Handler:
    return GroupNormHandler(module)


@handler_for.register(nn.LayerNorm)
def _(module: nn.Module) -> Handler:
    return LayerNormHandler(module)


@handler_for.register(nn.RMSNorm)
def _(module: nn.Module) -> Handler:
    return RMSNormHandler(module)


@dataclass(frozen=True)
class Plan:
    """How a model's parameters are treated.

    Attributes:
        handlers: by the layer's name in ``named_modules()``; of tied modules, the first one's.
        plain: the reason for the plain gradient, by parameter name.
        layer_of: the (layer, role) of every other parameter, by parameter name.
        curvature: how the blocks of linear and convolutional layers are approximated.
    """

    handlers: dict[str, Handler]
    plain: dict[str, str]
    layer_of: dict[str, tuple[str, str]]
    curvature: str


def plan_layers(model: nn.Module, max_factor_size: int, curvature: str = "kfc") -> Plan:
    """Give every parameter of the model a handler, or a reason for having none.

    Args:
        max_factor_size: factors wider than this keep their diagonal only.
        curvature: a key of ``kfc.layers.structures.STRUCTURES``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = {name: m for name, m in model.named_modules() if _own_parameters(m)}
    treatments = {name: _treatment(name, module) for name, module in owners.items()}
    leaders = _join_tied(owners, treatments)

    plan = Plan({}, {}, {}, curvature)
    for name, module in owners.items():
        treatment = treatments[name]
        if isinstance(treatment, Handler) and leaders[name] == name:
            treatment.max_factor_size = max_factor_size
            if isinstance(treatment, KroneckerHandler):
                treatment.structure = STRUCTURES[curvature]
            plan.handlers[name] = treatment
        for role, parameter in _own_parameters(module).items():
            key = names[id(parameter)]
            if isinstance(treatment, PlainGradient):
                plan.plain[key] = treatment.reason
            elif role in treatment.roles:
                plan.layer_of[key] = (leaders[name], role)
            else:
                plan.plain[key] = f"{type(module).__name__}'s handler does not cover {role!r}"
    return plan


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {role: p for role, p in module._parameters.items() if p is not None}


def _treatment(name: str, module: nn.Module) -> Handler | PlainGradient:
    for role, parameter in _own_parameters(module).items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}.{role} is not initialised yet: {type(module).__name__} is a lazy module; "
                "run one batch through the model before giving it to the optimizer"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name}.{role} has dtype {parameter.dtype}; only real parameters can be trained"
            )
    treatment = handler_for(module)
    if isinstance(treatment, PlainGradient):
        return treatment
    if module._parameters.get("weight") is None:
        if not hasattr(module, "weight"):
            raise ValueError(
                f"{name} has a handler, but no parameter called 'weight': handlers cover a "
                "module's own 'weight' and 'bias'"
            )
        return PlainGradient("its weight is computed from other parameters (parametrised)")
    known = next(cls for cls in type(module).__mro__ if cls in handler_for.registry)
    for method in ("forward", "_conv_forward"):
        inherited = getattr(type(module), method, None) is getattr(known, method, None)
        if method in module.__dict__ or not inherited:
            return PlainGradient(
                f"{type(module).__name__} has a {method} of its own; register a handler for it"
            )
    return treatment


def _join_tied(
    owners: dict[str, nn.Module], treatments: dict[str, Handler | PlainGradient]
) -> dict[str, str]:
    """Join modules that share parameters; return the name of each one's layer.

    Modules of one configuration that share all their parameters become one layer, called several
    times. Any other tie has no Kronecker factors: those modules are given the plain gradient.
    """
    sharers: dict[int, list[str]] = defaultdict(list)
    for name, module in owners.items():
        for parameter in _own_parameters(module).values():
            sharers[id(parameter)].append(name)
    ties = [names for names in sharers.values() if len(names) > 1]

    unsettled = True
    while unsettled:
        unsettled = False
        for names in ties:
            if len({_configuration(owners[name], treatments[name]) for name in names}) == 1:
                continue
            for name in names:
                if isinstance(treatments[name], Handler):
                    others = ", ".join(repr(other) for other in names if other != name)
                    treatments[name] = PlainGradient(f"tied to {others}, a different kind of use")
                    unsettled = True

    leaders = {name: name for name in owners}
    for names in ties:
        leader = treatments[names[0]]
        if isinstance(leader, Handler):
            leader.modules = [owners[name] for name in names]
            leaders.update(dict.fromkeys(names, names[0]))
    return leaders


def _configuration(module: nn.Module, treatment: Handler | PlainGradient) -> object:
    """Equal for modules whose calls can count as calls of one layer."""
    if isinstance(treatment, PlainGradient):
        return "plain"
    shared = tuple((role, id(p)) for role, p in _own_parameters(module).items())
    # Running statistics are part of what a normalisation layer computes.
    buffers = tuple(id(b) for b in module._buffers.values() if b is not None)
    return type(module), module.extra_repr(), shared, buffers
