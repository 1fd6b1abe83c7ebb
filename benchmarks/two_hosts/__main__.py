"""Entry point of `python -m benchmarks.two_hosts`."""

import sys

from benchmarks.two_hosts.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
