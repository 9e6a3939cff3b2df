"""``python -m kfc`` is the ``kfc`` command."""

from kfc.lab.cli import app

app()
