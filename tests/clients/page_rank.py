"""One rank of a program in docs/integrations.md: runs the program under a heading and writes its results.

    torchrun --nproc-per-node 2 -m tests.clients.page_rank HEADING FOLDER [--replace OLD NEW ...]

The program runs in FOLDER, where each rank writes rank<N>.json. ``--replace`` edits it first.
"""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests.clients.common import digest
from tests.pages import code_of

CLASSES = ("torch", "torchddp")


class Seen:
    """The first wrapped model whose forward ran, and its initial weights."""

    model: Any = None
    start = ""

    def record(self, module: nn.Module, args: Any) -> None:
        if self.model is None and isinstance(module, TorchDDP):
            self.model, self.start = module, digest(module.named_parameters())


def define_operators_of_torchvision() -> None:
    """PyPI's torchvision needs the CUDA build of torch. With the CPU build all but its operators work, if the operators
    that it looks up at import are defined.
    """
    if importlib.util.find_spec("torchvision") is not None and not torch.backends.cuda.is_built():
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("heading")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replace", nargs=2, action="append", default=[])
    given = parser.parse_args()
    code = code_of("integrations.md", given.heading)
    for old, new in given.replace:
        assert code.count(old) == 1, f"{code.count(old)} times in the program: {old}"
        code = code.replace(old, new)
    define_operators_of_torchvision()
    torch.set_num_threads(1)
    os.chdir(given.folder)
    seen = Seen()
    register_module_forward_pre_hook(seen.record)
    exec(compile(code, "integrations.md", "exec"), {"__name__": "__main__"})
    packages = [cls.__module__.partition(".")[0] for cls in type(seen.model).__mro__]
    found = {
        "made": type(seen.model).__qualname__,
        "class": next(name for name in packages if name in CLASSES),
        "start": seen.start,
        "weights": digest(seen.model.named_parameters()),
        "steps": torchddp.finished_steps(),
        "transport": seen.model.session.options.transport if isinstance(seen.model, torchddp.DDP) else "torch's",
    }
    Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    # Skip the interpreter's shutdown, during which gloo's threads may want the GIL and abort, with any DDP class.
    os._exit(0)


if __name__ == "__main__":
    main()
