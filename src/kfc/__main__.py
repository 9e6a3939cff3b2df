"""The ``kfc`` command, also ``python -m kfc``."""

import sys


def main() -> None:
    """Run the command, or say how to install what it needs."""
    try:
        from kfc.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("kfc", "torch"):
            raise
        sys.exit(
            f"Error: the kfc command needs the package {error.name}, which is not installed: "
            'pip install "kfc-torch[experiments]"'
        )
    app()


if __name__ == "__main__":
    main()
