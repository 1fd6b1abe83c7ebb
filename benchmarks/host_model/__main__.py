"""Entry point of `python -m benchmarks.host_model`."""

import sys

from benchmarks.host_model.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
