"""Entry point of `python -m benchmarks.sharded`."""

import sys

from benchmarks.sharded.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
