"""Run the command line with ``python -m qfuse``."""

from qfuse.cli import main

if __name__ == "__main__":
    main()
