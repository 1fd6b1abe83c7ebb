"""Entry point of `python -m benchmarks.compress`."""

import sys

from benchmarks.compress.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
