"""Entry point of `python -m benchmarks`."""

import sys

from benchmarks.cases import CASES
from torchddp.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
