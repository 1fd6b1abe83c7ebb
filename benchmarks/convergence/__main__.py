"""Entry point of `python -m benchmarks.convergence`."""

import sys

from benchmarks.convergence.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
