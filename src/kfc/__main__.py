"""The ``kfc`` command as ``python -m kfc``."""

from kfc_command import main

if __name__ == "__main__":
    main()
