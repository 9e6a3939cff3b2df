"""The networks of the experiments by name, and the user's own by "module:function"."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from shlex import quote

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kfc.lab.networks import architectures
from kfc.lab.networks.architectures import ResNet20, autoencoder, cuda_convnet, initialise
from kfc.lab.options import not_one_of

__all__ = ["NETWORKS", "Network", "NetworkError", "build", "require_known", "require_trusted"]
OWN = "or module:function for your own"


class NetworkError(ValueError):
    """A network that cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class Network:
    """A network that is known by name.

    Attributes:
        make: builds it from (channels, classes), with torch's own initialisation.
        image_sizes: sides of the square images that it takes; empty if any size is possible.
        inits: its initialisations, the default first, each with the form of the inputs that it is
            meant for: ``"centred"`` (pixels minus their mean), ``"normalised"`` (zero mean and unit
            variance) or ``"unit"`` (0 to 1).
        weight_costs: the published λ by parameter name.
        task: a name in ``kfc.lab.components.TASKS``.
    """

    make: Callable[[int, int], nn.Module]
    image_sizes: tuple[int, ...]
    inits: Mapping[str, str] = field(default_factory=lambda: {"kaiming": "normalised"})
    weight_costs: Mapping[str, float] = field(default_factory=dict)
    task: str = "classification"

    @property
    def default_init(self) -> str:
        return next(iter(self.inits))


_cuda_convnet = partial(
    Network,
    image_sizes=(32,),
    inits={"kaiming": "normalised", "cuda-convnet": "centred"},
    weight_costs=architectures.WEIGHT_COSTS,
)
_autoencoder = partial(Network, inits={"glorot": "unit"}, task="reconstruction")

NETWORKS: Mapping[str, Network] = {
    "cuda-convnet": _cuda_convnet(cuda_convnet),
    "cuda-convnet-bn": _cuda_convnet(partial(cuda_convnet, batch_normalised=True), weight_costs={}),
    "cuda-convnet-avg": _cuda_convnet(partial(cuda_convnet, pooling=("average",) * 3)),
    "cuda-convnet-max": _cuda_convnet(partial(cuda_convnet, pooling=("max",) * 3)),
    "svhn-convnet": Network(architectures.svhn_convnet, (32,)),
    "resnet20": Network(ResNet20, ()),
    "resnet20-nobn": Network(partial(ResNet20, normalised=False), ()),
    "vgg": Network(architectures.vgg, (28, 32)),
    "digits": Network(architectures.digits, (8,)),
    # Hinton and Salakhutdinov's for MNIST, as Martens and Grosse (2015) train it with K-FAC.
    "autoencoder": _autoencoder(partial(autoencoder, sizes=(784, 1000, 500, 250, 30)), (28,)),
    "digits-autoencoder": _autoencoder(partial(autoencoder, sizes=(64, 128, 64, 32, 10)), (8,)),
}


def require_known(name: str) -> None:
    """Raise ``NetworkError`` unless the name is one of ``NETWORKS`` or "module:function"."""
    if name not in NETWORKS and ":" not in name:
        raise NetworkError(not_one_of("net", name, NETWORKS, OWN))


def require_trusted(name: str, folder: Path, named: Collection[str], *, trust: bool) -> None:
    """Raise ``NetworkError`` if only a folder, and not the user, asks to import a network.

    Importing runs code, and the folder may come from anywhere.

    Args:
        name: the network of the run in the folder.
        named: the networks that the user has named in the command.
        trust: whether the user has said to trust the folder.
    """
    if ":" not in name or trust:
        return
    if name not in named:
        raise NetworkError(
            f"{folder} asks for the network {name}, and importing it runs code. If it is your "
            f"own, name it again: --net {quote(name)}. With --trust-net, whatever the folder "
            "names is imported"
        )
    for source in _sources_of(name):
        if source.resolve().is_relative_to(folder.resolve()):
            raise NetworkError(
                f"{name} would be imported from {source}, which is in the folder of the run; run "
                "the command where your own module is, or trust the folder with --trust-net"
            )
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        # Also modules that the network's module imports.
        raise NetworkError(
            f"{name} could import modules from the current directory, which is in the folder of "
            "the run; run the command in another one, or trust the folder with --trust-net"
        )


def _sources_of(name: str) -> list[Path]:
    """Return the files and folders from which a network's module would be imported, if known."""
    with _current_directory_importable(), suppress(ImportError, ValueError):
        spec = find_spec(name.partition(":")[0].partition(".")[0])
        places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
        return [Path(place) for place in places if place is not None]
    return []


def build(
    name: str, *, image: tuple[int, int, int], classes: int, init: str | None, seed: int
) -> nn.Module:
    """Return a network whose weights depend on the seed only, not on the global random state.

    Args:
        name: a name in ``NETWORKS``, or ``"module:function"`` for a function of the user
            without arguments; the current directory is importable.
        image: (channels, height, width).
        init: the initialisation; ``None`` for the network's default, or the user's own.
    """
    # All devices, since the user's network may be on any.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        if ":" in name:
            return _build_own(name, init)
        return _build_known(name, image, classes, init)


def _build_known(
    name: str, image: tuple[int, int, int], classes: int, init: str | None
) -> nn.Module:
    require_known(name)
    network = NETWORKS[name]
    channels, height, width = image
    if network.image_sizes and (height != width or height not in network.image_sizes):
        sizes = " or ".join(f"{side}x{side}" for side in network.image_sizes)
        raise _error(
            f"{name} takes images of {sizes} pixels, and those of the data have {height}x{width}"
        )
    if init not in (None, *network.inits):
        raise NetworkError(not_one_of(f"init of {name}", init, network.inits))
    model = network.make(channels, classes)
    initialise(model, init or network.default_init)
    return model


def _build_own(name: str, init: str | None) -> nn.Module:
    if init is not None:
        raise _error(
            f"the initialisation {init!r} is for networks known by name; {name} initialises its "
            "own weights, so leave it out"
        )
    with _current_directory_importable():
        try:
            function = pkgutil.resolve_name(name)
        except Exception as error:
            raise _error(
                f"{name!r} could not be imported ({type(error).__name__}: {error}); run from the "
                "folder that contains the module, or install it"
            ) from error
        try:
            model = function()
        except Exception as error:
            raise _error(
                f"{name} failed when called without arguments ({type(error).__name__}: {error})"
            ) from error
    if not isinstance(model, nn.Module):
        raise _error(
            f"{name} returned {type(model).__name__}, not a torch.nn.Module; let it return the "
            "network"
        )
    for part, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise NetworkError(
                f"{name} returned a network whose {part} is lazy and has no shape yet; let it run "
                "the network on one batch before it returns it"
            )
        if tensor.is_meta:
            raise NetworkError(
                f"{name} returned a network whose {part} is on the device meta and has no values; "
                "let it initialise the network on the CPU"
            )
    return model


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Let modules in the current directory be imported, as for ``python script.py``."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def _error(message: str) -> NetworkError:
    return NetworkError(f"{message}; net may be one of {', '.join(NETWORKS)}, {OWN}")
