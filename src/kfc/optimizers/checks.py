"""Checks of what optimizers are given."""

from collections.abc import Iterable, Mapping

from torch import nn

from kfc._helpers import require_whole
from kfc.curvature.options import Approximation
from kfc.distributed.options import Parallel
from kfc.distributed.sharding import refuse_sharded, refuse_sharding_wrapper
from kfc.layers import Plan
from kfc.schedule import Budget, Periods


def check_model(model: object) -> None:
    """Raise an error unless the model is a module with parameters that can be trained."""
    if not isinstance(model, nn.Module):
        advice = ""
        if isinstance(model, Iterable):  # parameters, or param groups
            advice = (
                ". Pass the model itself instead of its parameters, and options of some of them by "
                "groups=:\n"
                "    optimizer = kfc.KFC(model)\n"
                "    trainer = Trainer(model, args, optimizers=(optimizer, None))  # Hugging Face"
            )
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{advice}")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters to train")
    refuse_sharding_wrapper(model)
    refuse_sharded(model.named_parameters())


def check_options(
    seed: object, curvature: Approximation, schedule: object, parallel: object
) -> None:
    """Raise an error unless these are options that fit together."""
    if seed is not None:
        require_whole("seed", seed, low=None)
        if curvature.fisher != "sampled":
            raise ValueError(
                f"seed has no effect with fisher={curvature.fisher!r}, which samples no targets; "
                "remove it"
            )
    if not isinstance(schedule, (Periods, Budget)):
        raise TypeError(f"schedule must be kfc.Periods or kfc.Budget, got {schedule!r}")
    if not isinstance(parallel, (Parallel, type(None))):
        raise TypeError(f"parallel must be kfc.Parallel or None, got {parallel!r}")


def described(model: nn.Module, plan: Plan, options: Mapping[str, object]) -> dict[str, str]:
    """Return what has to be the same on all ranks, by names that errors use."""
    layers = {name: type(layer).__name__ for name, layer in plan.layers.items()}
    return {
        **{name: str(option) for name, option in options.items()},
        **{
            f"parameter {name!r}": f"{tuple(p.shape)} {p.dtype}"
            + ("" if p.requires_grad else " frozen")
            for name, p in model.named_parameters()
        },
        **{f"the treatment of layer {name!r}": kind for name, kind in layers.items()},
    }
