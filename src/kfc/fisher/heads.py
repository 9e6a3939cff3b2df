"""The outputs of a model that its loss is computed from, and their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

from kfc._helpers import tree_leaves
from kfc.fisher.likelihoods import Likelihood, resolve_likelihood

Output = Callable[[Any], Any]
# One output has the empty name.
LikelihoodChoice = str | Likelihood | Mapping[str, str | Likelihood]


def named(choice: LikelihoodChoice) -> Mapping[str, str | Likelihood]:
    """Return the choices by the name of the output."""
    if isinstance(choice, Mapping) and not choice:
        raise ValueError("likelihood must name at least one output, got an empty dict")
    return choice if isinstance(choice, Mapping) else {"": choice}


def resolve_likelihoods(choice: LikelihoodChoice) -> dict[str, Likelihood]:
    """Return the likelihood of each output, by name."""
    return {name: resolve_likelihood(each) for name, each in named(choice).items()}


def usual_output(result: Any) -> Output | None:
    """Return what selects the outputs from a result that is not a tensor, if that is unambiguous.

    These are the attribute ``logits``, as in Hugging Face's ``ModelOutput``; or, in a tuple or
    list, the only tensor of floating-point numbers that requires a gradient and has at least one
    dimension. If gradients are off, the only one of them all. A tensor is taken as it is, because
    some models return more only in some passes.
    """
    if isinstance(getattr(result, "logits", None), Tensor):
        return partial(_unless_tensor, attrgetter("logits"))
    if not isinstance(result, (tuple, list)):
        return None
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.dim()]
    found = [leaf for leaf in found if leaf.requires_grad] or found
    places = [index for index, item in enumerate(result) if len(found) == 1 and item is found[0]]
    return partial(_unless_tensor, itemgetter(places[0])) if places else None


def _unless_tensor(select: Output, result: Any) -> Any:
    return result if isinstance(result, Tensor) else select(result)


def select_output(result: Any, output: Output | None) -> Tensor:
    """Return the tensor of outputs among what the model returned; raise if it is not a tensor."""
    return select_outputs(result, output, [""])[""]


def select_outputs(result: Any, output: Output | None, names: list[str]) -> dict[str, Tensor]:
    """Return the tensors of outputs by name, among what the model returned.

    Args:
        output: selects the tensor, or a dict of tensors, from what the model returned. By default
            all of it, or a single tensor by ``usual_output()``.
        names: the names of the outputs; one empty name for a single tensor.
    """
    if output is None and names == [""] and not isinstance(result, Tensor):
        output = usual_output(result)
    selected = result if output is None else output(result)
    origin = "the model returned" if output is None else "output= returned"
    if names != [""]:
        if not isinstance(selected, Mapping):
            raise TypeError(
                f"likelihood= names the outputs {names}, so output= must return a dict with these "
                f"names, but {origin} a {type(selected).__name__}"
            )
        missing = [name for name in names if name not in selected]
        if missing:
            raise ValueError(f"{origin} no outputs {missing}; it has {sorted(map(str, selected))}")
        return _with_equal_examples({name: _tensor(selected[name], origin) for name in names})
    return {"": _tensor(selected, origin)}


def _tensor(selected: Any, origin: str) -> Tensor:
    if not isinstance(selected, Tensor):
        raise TypeError(
            f"{origin} a {type(selected).__name__}, not a tensor; select the outputs that the loss "
            "is computed from, for instance output=lambda out: out.logits or "
            "output=lambda out: out[0]"
        )
    return selected


def _with_equal_examples(selected: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = {name: len(tensor) if tensor.dim() else 0 for name, tensor in selected.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"all outputs must have the same number of examples, their first dimension, got "
            f"{counts}; reshape them in output="
        )
    return selected
