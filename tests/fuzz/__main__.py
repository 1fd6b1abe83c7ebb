"""Entry point of `python -m tests.fuzz`. Nothing imports it: other tests' ranks would inherit what it sets."""

import os
import sys

# Before torch is imported: the ranks share few cores, and its warnings about these odd programs are useless.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.fuzz.command import main

sys.exit(main(sys.argv[1:]))
