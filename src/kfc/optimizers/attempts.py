"""Steps that are undone if an error interrupts them."""

from kfc.optimizers.engine import Engine


class Attempt:
    """A context that undoes the step in progress of an engine if an error leaves it."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            self._engine.undo_step()
