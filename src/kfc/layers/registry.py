"""Which layer class describes a module, and how every parameter of a model is treated."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import singledispatch

from torch import nn
from torch.nn.parameter import UninitializedParameter

from kfc.layers.attention import InProjectionLayer
from kfc.layers.base import Layer, LinearLayer
from kfc.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from kfc.layers.embedding import EmbeddingLayer, TiedEmbeddingLayer
from kfc.layers.look_alikes import METHODS, look_alike
from kfc.layers.normalisation import (
    BatchNormLayer,
    GroupNormLayer,
    InstanceNormLayer,
    LayerNormLayer,
    RMSNormLayer,
)


@dataclass(frozen=True)
class PlainGradient:
    """The treatment of parameters without a Fisher block, with the reason."""

    reason: str


@singledispatch
def layer_for(module: nn.Module) -> Layer | PlainGradient:
    """Return the layer of a module; add module types with ``@layer_for.register``."""
    return PlainGradient(f"no layer class for {type(module).__name__}")


@layer_for.register(nn.MultiheadAttention)
def _(module: nn.MultiheadAttention) -> Layer | PlainGradient:
    if module.in_proj_weight is None:
        return PlainGradient("the projections of queries, keys and values are separate")
    return InProjectionLayer(module)


@layer_for.register(nn.Embedding)
def _(module: nn.Embedding) -> Layer | PlainGradient:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            return PlainGradient(f"{type(module).__name__} with {option}={getattr(module, option)}")
    return EmbeddingLayer(module)


LAYERS: dict[type[Layer], tuple[type[nn.Module], ...]] = {
    LinearLayer: (nn.Linear,),
    ConvolutionLayer: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    TransposedConvolutionLayer: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    BatchNormLayer: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    InstanceNormLayer: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    GroupNormLayer: (nn.GroupNorm,),
    LayerNormLayer: (nn.LayerNorm,),
    RMSNormLayer: (nn.RMSNorm,),
}
for _layer, _modules in LAYERS.items():
    for _module in _modules:
        layer_for.register(_module, _layer)


@dataclass(frozen=True)
class Plan:
    """How the parameters of a model are treated.

    Attributes:
        layers: the layers by name in ``named_modules()``; tied modules have their first name.
        plain: the reason for the plain gradient, by parameter name.
        layer_of: the (layer, role) of every other parameter, by parameter name.
    """

    layers: dict[str, Layer]
    plain: dict[str, str]
    layer_of: dict[str, tuple[str, str]]

    def without(self, excluded: Mapping[str, str]) -> "Plan":
        """Return the plan with the plain gradient for some layers.

        Args:
            excluded: the reason by layer name.
        """
        owners = {name: layer for name, (layer, _) in self.layer_of.items()}
        return Plan(
            {name: layer for name, layer in self.layers.items() if name not in excluded},
            self.plain
            | {name: excluded[layer] for name, layer in owners.items() if layer in excluded},
            {name: place for name, place in self.layer_of.items() if place[0] not in excluded},
        )


def find_layers(model: nn.Module) -> Plan:
    """Assign a layer, or a reason for the plain gradient, to every parameter of the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = {name: m for name, m in model.named_modules() if _own_parameters(m)}
    treatments = {name: _treatment(name, module) for name, module in owners.items()}
    treatments, leaders = _joined_where_tied(owners, treatments)

    plan = Plan({}, {}, {})
    for name, module in owners.items():
        treatment = treatments[name]
        if isinstance(treatment, Layer) and leaders[name] == name:
            plan.layers[name] = treatment
        for own, parameter in _own_parameters(module).items():
            key = names[id(parameter)]
            if isinstance(treatment, PlainGradient):
                plan.plain[key] = treatment.reason
                continue
            plan.plain.pop(key, None)  # of a module that only holds the parameter
            roles = {treatment.names.get(role, role): role for role in treatment.roles}
            if own in roles:
                plan.layer_of[key] = (leaders[name], roles[own])
            else:
                plan.plain[key] = f"{type(treatment).__name__} does not cover {own!r}"
    return plan


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {role: p for role, p in module._parameters.items() if p is not None}


def _treatment(name: str, module: nn.Module) -> Layer | PlainGradient:
    reason = _unsuitable_parameters(name, module)
    if reason:
        return PlainGradient(reason)
    treatment = layer_for(module)
    known = next(cls for cls in type(module).__mro__ if cls in layer_for.registry)
    if isinstance(treatment, PlainGradient):
        return _by_running(module, treatment.reason) if known is object else treatment
    if module._parameters.get(treatment.names.get("weight", "weight")) is None:
        if not hasattr(module, "weight"):
            raise ValueError(
                f"{name} has a layer class, but no parameter called 'weight': layer classes cover "
                "a module's own 'weight' and 'bias'"
            )
        return PlainGradient("its weight is computed from other parameters (parametrised)")
    for method in METHODS:
        inherited = getattr(type(module), method, None) is getattr(known, method, None)
        if method in module.__dict__ or not inherited:
            reason = f"{type(module).__name__} overrides {method}; register a layer class for it"
            return _by_running(module, reason, type(treatment))
    return treatment


def _unsuitable_parameters(name: str, module: nn.Module) -> str:
    """Return why the parameters of a module have no factors; empty if they may have.

    Raises:
        ValueError: if they cannot be trained at all.
    """
    for role, parameter in _own_parameters(module).items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}.{role} is not initialised yet: {type(module).__name__} is a lazy module; "
                "run one batch through the model before giving it to the optimizer"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"{name}.{role} has dtype {parameter.dtype}; only real parameters can be trained"
            )
        if role in ("weight", "bias"):
            if not parameter.is_floating_point():
                return f"its {role} has dtype {parameter.dtype}"
            if not parameter.numel():
                return f"its {role} is empty"
    return ""


def _by_running(
    module: nn.Module, reason: str, stock: type[Layer] | None = None
) -> Layer | PlainGradient:
    """Return the layer that a module is found to compute, or a plain gradient for a reason."""
    if not any(p.requires_grad for p in _own_parameters(module).values()):
        reason = f"{type(module).__name__} was frozen when the optimizer was made"
    return look_alike(module, stock) or PlainGradient(reason)


def _joined_where_tied(
    owners: dict[str, nn.Module], treatments: dict[str, Layer | PlainGradient]
) -> tuple[dict[str, Layer | PlainGradient], dict[str, str]]:
    """Return the treatment and the layer name of each module, where modules may share parameters.

    Modules of one configuration that share all their parameters become one layer, called several
    times, and so do a linear layer and embeddings that share its weight. Modules with any other tie
    have no Kronecker factors. A module of unknown type that holds a parameter of a module inside of
    it, as heads of Transformers do, is taken not to use it.
    """
    sharers: dict[int, list[str]] = defaultdict(list)
    for name, module in owners.items():
        for parameter in _own_parameters(module).values():
            sharers[id(parameter)].append(name)
    for names in sharers.values():
        holders = [name for name in names if _only_holds(name, names, treatments)]
        names[:] = [name for name in names if name not in holders]
    ties = [names for names in sharers.values() if len(names) > 1]

    treatments, joined = dict(treatments), set[str]()
    for names in ties:
        layer = _tied_embedding([(owners[name], treatments[name]) for name in names])
        if layer is not None:
            treatments.update(dict.fromkeys(names, layer))
    unsettled = True
    while unsettled:
        unsettled = False
        for names in ties:
            if len({_configuration(owners[name], treatments[name]) for name in names}) == 1:
                continue
            reason = f"{' and '.join(map(repr, names))} share a parameter and use it differently"
            for name in names:
                unsettled |= isinstance(treatments[name], Layer)
                if name not in joined:
                    treatments[name] = PlainGradient(reason)
                    joined.add(name)

    leaders = {name: name for name in owners}
    for names in ties:
        leader = treatments[names[0]]
        if isinstance(leader, Layer):
            members = [treatments[name] for name in names]
            treatments[names[0]] = tied = copy(leader)
            tied.tie(tuple(owners[name] for name in names))
            if any(isinstance(each, Layer) and each.functional for each in members):
                tied.use_function()
            leaders.update(dict.fromkeys(names, names[0]))
    return treatments, leaders


def _only_holds(
    name: str, names: Collection[str], treatments: Mapping[str, Layer | PlainGradient]
) -> bool:
    """Return whether a module of unknown type shares a parameter with a layer inside of it."""
    inside = f"{name}." if name else ""
    return isinstance(treatments[name], PlainGradient) and any(
        other != name and other.startswith(inside) and isinstance(treatments[other], Layer)
        for other in names
    )


def _tied_embedding(
    sharers: list[tuple[nn.Module, Layer | PlainGradient]],
) -> TiedEmbeddingLayer | None:
    """Return the layer of a linear module and of embeddings that share its weight, if they are."""
    heads = [module for module, layer in sharers if type(layer) is LinearLayer]
    embeddings = [module for module, layer in sharers if type(layer) is EmbeddingLayer]
    paddings = {module.padding_idx for module in embeddings if isinstance(module, nn.Embedding)}
    are_all = len(heads) + len(embeddings) == len(sharers)
    if not are_all or len(heads) != 1 or len(paddings) != 1:
        return None
    tied = TiedEmbeddingLayer(heads[0])
    if any(isinstance(layer, Layer) and layer.functional for _, layer in sharers):
        tied.use_function()
    return tied


def _configuration(module: nn.Module, treatment: Layer | PlainGradient) -> object:
    """Return a value that is equal for modules whose calls can count as calls of one layer."""
    if isinstance(treatment, PlainGradient):
        return "plain"
    if isinstance(treatment, TiedEmbeddingLayer):
        return treatment
    if isinstance(module, nn.Embedding):  # what is done to the rows does not count
        return EmbeddingLayer, id(module.weight), module.padding_idx
    shared = tuple((role, id(p)) for role, p in _own_parameters(module).items())
    # Running statistics are part of what a normalisation layer computes.
    buffers = tuple(id(b) for b in module._buffers.values() if b is not None)
    return type(module), module.extra_repr(), shared, buffers
