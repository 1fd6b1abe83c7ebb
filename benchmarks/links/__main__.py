"""Entry point of `python -m benchmarks.links`."""

import sys

from benchmarks.links.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
