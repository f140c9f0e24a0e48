"""``python -m qfuse`` is the command line."""

from qfuse.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
