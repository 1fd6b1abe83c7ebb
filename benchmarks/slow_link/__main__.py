"""Entry point of `python -m benchmarks.slow_link`."""

import sys

from benchmarks.slow_link.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
