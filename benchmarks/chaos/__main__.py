"""Entry point of `python -m benchmarks.chaos`."""

import sys

from benchmarks.chaos.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
