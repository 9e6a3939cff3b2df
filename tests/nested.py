"""Compare nested dicts and lists, such as state dicts, bit for bit."""

import torch


def leaves(value, path=()):
    """Yield (path, leaf) of nested dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def first_difference(one, other):
    """Return the path of the first leaf that differs; ``None`` if there is none. NaN equals NaN."""
    one, other = dict(leaves(one)), dict(leaves(other))
    for path in [*one, *other]:
        if path not in one or path not in other:
            return path
        a, b = one[path], other[path]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)
        if not same:
            return path
    return None
