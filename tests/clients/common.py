"""Helpers shared by the clients' tests: start programs and compare trained models."""

import hashlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pages import blocks_of, code_of
from tests.programs import ROOT

OURS = "torchddp.ddp.module.DistributedDataParallel"
TORCHS = "torch.nn.parallel.distributed.DistributedDataParallel"
# Variables of launchers or the user's shell that test programs must not inherit.
DROPPED = ("TORCHDDP_", "LOCAL_RANK", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")


def launch(
    *arguments: object, ranks: int = 0, timeout_s: float = 280, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python arguments`, under torchrun if `ranks` > 0, on CPU, with one thread per process and no network."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
    done = subprocess.run(
        [sys.executable, *([*torchrun, str(ranks)] if ranks else []), *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, **own, "ACCELERATE_USE_CPU": "true", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        start_new_session=True,
    )
    assert not check or done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def assert_has_the_losses_of_its_page(page: str, section: str, folder: Path) -> None:
    """Run a section's program on two ranks, in the folder; assert that it prints the losses that the page shows."""
    program = folder / "program.py"
    program.write_text(f"import os\nos.chdir({str(folder)!r})\n{code_of(page, section)}")
    found, shown = (
        {step: float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", text, re.MULTILINE)}
        for text in (launch(program, ranks=2).stdout, "\n".join(blocks_of(page, section, "text")))
    )
    assert shown and found == pytest.approx(shown, rel=0.05)


def save_results(find: Callable[[Path], dict[Any, Any]]) -> None:
    """Main of `python -m MODULE FOLDER` on a rank: saves results and UsageWarnings to FOLDER/rankN.pt."""
    import torchddp

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torchddp.UsageWarning)
        found = find(folder)
    found["told"] = [str(w.message) for w in caught if issubclass(w.category, torchddp.UsageWarning)]
    torch.save(found, folder / f"rank{os.environ.get('LOCAL_RANK', 0)}.pt")


def saved_by_ranks(module: str, folder: Path, ranks: int = 0, timeout_s: float = 500) -> list[dict[Any, Any]]:
    """Run such a module, which starts its two ranks itself if `ranks` = 0; return what each saved. Its jobs are
    correct, so there must be no UsageWarning.
    """
    launch("-m", module, folder, ranks=ranks, timeout_s=timeout_s)
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [of_rank["told"] for of_rank in found] == [[], []]
    return found


def digest(named: Any) -> str:
    """A bitwise digest of (name, tensor) pairs."""
    bits = hashlib.sha256()
    for name, value in named:
        bits.update(name.encode())
        bits.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def distance(model: nn.Module, start: nn.Module, reference: nn.Module) -> float:
    """The distance of the weights from the reference, relative to how far the reference moved."""
    flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, start, reference)]
    return float((flat[0] - flat[2]).abs().max() / (flat[2] - flat[1]).abs().max())


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
