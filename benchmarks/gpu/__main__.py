"""Entry point of `python -m benchmarks.gpu`."""

import sys

from benchmarks.gpu.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
