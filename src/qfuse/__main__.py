"""Run the command line with ``python -m qfuse``."""

from qfuse_command import console_main

if __name__ == "__main__":
    console_main()
