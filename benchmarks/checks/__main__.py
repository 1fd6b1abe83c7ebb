"""Entry point of `python -m benchmarks.checks`."""

import sys

from benchmarks.checks.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
