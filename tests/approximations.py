"""The approximations of the Fisher matrix, by name, for tests of all of them."""

from dataclasses import fields
from typing import Any

from kfc.curvature.options import APPROXIMATIONS, Approximation

CURVATURES = tuple(APPROXIMATIONS)
#: Approximations that consist of Kronecker factors, or start from those of KFC.
FACTORED = ("kfc", "sua", "prong", "ekfac")


def approximation(name: str, **options: Any) -> Approximation:
    """Return the value object with those of the options that the approximation has."""
    cls = APPROXIMATIONS[name]
    known = {field.name for field in fields(cls)}
    return cls(**{option: value for option, value in options.items() if option in known})
