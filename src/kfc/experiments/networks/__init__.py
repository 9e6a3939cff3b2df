"""The networks of the experiments by name, and the user's own by "module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from kfc.experiments.networks.autoencoder import DIGITS_SIZES, MNIST_SIZES, autoencoder
from kfc.experiments.networks.cuda_convnet import WEIGHT_COSTS, cuda_convnet
from kfc.experiments.networks.digits import digits
from kfc.experiments.networks.initialisation import INITIALISATIONS
from kfc.experiments.networks.resnet import ResNet
from kfc.experiments.networks.svhn_convnet import svhn_convnet
from kfc.experiments.networks.vgg import vgg

__all__ = ["NETWORKS", "Network", "NetworkError", "build"]


class NetworkError(ValueError):
    """A network that cannot be built; the message says what was wrong and what to do."""


@dataclass(frozen=True)
class Network:
    """What is known of a network before it is built.

    Args:
        make: from (channels, classes), with torch's own initialisation.
        image_sizes: sides of the square images it is made for; none: any.
        summary: one line of help.
        inits: the initialisations it has, the default first.
        weight_costs: λ by parameter name, the paper's; other parameters have none.
        inputs: what its first initialisation goes with: ``"centred"``, pixels of 0 to 255 minus
            their mean, ``"normalised"``, zero mean and unit variance, or ``"unit"``, from 0 to 1.
        task: of :data:`kfc.experiments.tasks.TASKS`.
    """

    make: Callable[[int, int], nn.Module]
    image_sizes: tuple[int, ...]
    summary: str
    inits: tuple[str, ...] = ("kaiming",)
    weight_costs: Mapping[str, float] = field(default_factory=dict)
    inputs: str = "normalised"
    task: str = "classification"


_autoencoder = partial(Network, inits=("glorot",), inputs="unit", task="reconstruction")

_cuda_convnet_kin = partial(
    Network,
    image_sizes=(32,),
    inits=("paper", "kaiming"),
    weight_costs=WEIGHT_COSTS,
    inputs="centred",
)

NETWORKS: Mapping[str, Network] = {
    "cuda-convnet": _cuda_convnet_kin(
        make=cuda_convnet, summary="the paper's network for CIFAR-10: cuda-convnet's \"18%\""
    ),
    "cuda-convnet-bn": _cuda_convnet_kin(
        make=partial(cuda_convnet, batch_normalised=True),
        summary="the same with batch normalisation, without weight decay",
        weight_costs={},
    ),
    "cuda-convnet-avg": _cuda_convnet_kin(
        make=partial(cuda_convnet, pooling=("average", "average", "average")),
        summary="the same with average pooling everywhere",
    ),
    "cuda-convnet-max": _cuda_convnet_kin(
        make=partial(cuda_convnet, pooling=("max", "max", "max")),
        summary="the same with max pooling everywhere",
    ),
    "svhn-convnet": Network(
        svhn_convnet, (32,), "the paper's network for SVHN: three convolutions, dropout everywhere"
    ),
    "resnet20": Network(ResNet, (), "ResNet-20 for CIFAR, with batch normalisation"),
    "resnet20-nobn": Network(
        partial(ResNet, normalised=False), (), "ResNet-20 without any normalisation"
    ),
    "vgg": Network(vgg, (28, 32), "a small VGG of eight layers, without normalisation"),
    "digits": Network(digits, (8,), "two small convolutions, for scikit-learn's digits"),
    "autoencoder": _autoencoder(
        make=lambda channels, _: autoencoder(channels, 28, MNIST_SIZES),
        image_sizes=(28,),
        summary="a deep autoencoder for MNIST, down to 30 units and back",
    ),
    "digits-autoencoder": _autoencoder(
        make=lambda channels, _: autoencoder(channels, 8, DIGITS_SIZES),
        image_sizes=(8,),
        summary="a deep autoencoder for scikit-learn's digits, down to 10 units and back",
    ),
}


def build(
    name: str, *, image: tuple[int, int, int], classes: int, init: str | None, seed: int
) -> nn.Module:
    """A network whose weights follow from the seed alone; the global random state stays as it is.

    Args:
        name: of :data:`NETWORKS`, or ``"module:function"``: the user's own, called without
            arguments, with the current directory importable.
        image: (channels, height, width).
        init: the initialisation; ``None``: the network's default, or the user's own.
    """
    # Every device, for a network of the user's own may start on any.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        if ":" in name:
            return _build_own(name, init)
        return _build_known(name, image, classes, init)


def _build_known(
    name: str, image: tuple[int, int, int], classes: int, init: str | None
) -> nn.Module:
    if name not in NETWORKS:
        raise NetworkError(f"there is no network {name!r}; {_choices()}")
    network = NETWORKS[name]
    channels, height, width = image
    if network.image_sizes and (height != width or height not in network.image_sizes):
        sizes = " or ".join(f"{side}x{side}" for side in network.image_sizes)
        raise NetworkError(
            f"{name} is made for images of {sizes} pixels, but these have {height}x{width}; take "
            f"other data or another network: {_choices()}"
        )
    chosen = network.inits[0] if init is None else init
    if chosen not in network.inits:
        raise NetworkError(
            f"{name} has no initialisation {chosen!r}; choose one of: {', '.join(network.inits)}"
        )
    model = network.make(channels, classes)
    INITIALISATIONS[chosen](model)
    return model


def _build_own(name: str, init: str | None) -> nn.Module:
    if init is not None:
        raise NetworkError(
            f"the initialisation {init!r} is for the networks known by name; {name} initialises "
            f"its own weights, so leave it out; {_choices()}"
        )
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise NetworkError(f"{name!r} is not of the form module:function; {_choices()}")
    with _current_directory_importable():
        model = _call(name, _import_function(module_name, function_name))
    if not isinstance(model, nn.Module):
        raise NetworkError(
            f"{name} returned {type(model).__name__}, not a torch.nn.Module; let it return the "
            f"network; {_choices()}"
        )
    return model


def _import_function(module_name: str, function_name: str) -> Callable[[], object]:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise NetworkError(
            f"the module {module_name!r} could not be imported ({_described(error)}); run from the "
            f"folder that holds it, or install it; {_choices()}"
        ) from error
    function: Callable[[], object] | None = getattr(module, function_name, None)
    if not callable(function):
        raise NetworkError(
            f"the module {module_name!r} has no function {function_name!r}; name one that takes no "
            f"arguments and returns a torch.nn.Module; {_choices()}"
        )
    return function


def _call(name: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:
        raise NetworkError(
            f"{name} failed when called without arguments ({_described(error)}); {_choices()}"
        ) from error


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """As for ``python script.py``; a console script has its own folder there instead."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _choices() -> str:
    return f"known: {', '.join(NETWORKS)}, or module:function for your own"
