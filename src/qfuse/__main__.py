"""``python -m qfuse`` is the command line."""

from qfuse.cli import main

if __name__ == "__main__":
    main()
