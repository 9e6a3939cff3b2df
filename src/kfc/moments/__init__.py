"""Second moments of patches, computed without patches where that is cheaper."""

from kfc.moments.patches import second_moment

__all__ = ["second_moment"]
