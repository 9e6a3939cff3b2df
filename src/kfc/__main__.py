"""``python -m kfc`` is the ``kfc`` command."""

from kfc.cli import app

app()
