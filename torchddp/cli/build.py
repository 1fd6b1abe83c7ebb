"""`torchddp build`: an extension for a torch that has none. Needs torch only, and no torchddp._C."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from torchddp._build import BuildError, build, wants_cuda
from torchddp._extension import CPU, find, running_versions
from torchddp.cli.options import AsJson, Option
from torchddp.harness.launch import EXIT_BAD_ARGUMENT

HELP = """Compile torchddp's extension for the installed torch.

Needed only where torchddp has none for it: a newer torch, a nightly, a vendor's own build, or another CUDA. It goes
into the user's cache ($TORCHDDP_CACHE_DIR or ~/.cache/torchddp), where `import torchddp` finds it from then on.

Takes two minutes on two cores. Needs g++ 12 or newer, Python's headers, cmake and ninja, and nvcc for GPUs.

\b
Examples:
  torchddp build
  torchddp build --kind cpu
      even if torch has CUDA and nvcc is there
"""
KINDS = ("cpu", "cuda")
KIND_HELP = "cpu or cuda. By default CUDA where torch has it and there is an nvcc."


def run(kind: Annotated[str, Option("--kind", metavar="KIND", help=KIND_HELP)] = "", as_json: AsJson = False) -> int:
    if kind not in ("", *KINDS):
        print(f"error: --kind {kind}: choose from {', '.join(KINDS)}.", file=sys.stderr)
        return EXIT_BAD_ARGUMENT
    try:
        running = running_versions()
    except (ImportError, OSError) as error:
        print(f"error: torch does not load: {error}", file=sys.stderr)
        return 1
    try:
        found = find(running)
        # For GPUs, the CPU's extension is not the best that there could be.
        is_enough = found is not None and not (f"-{CPU}." in found.name and wants_cuda(running, kind))
        path = found if is_enough else build(running, kind)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"file": str(path), **running}, indent=1) if as_json else f"torchddp uses {path}")
    return 0
