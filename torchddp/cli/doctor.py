"""`torchddp doctor`: what was built, what is running, and what does not fit. Needs torch only, and no torchddp._C."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import torchddp
from torchddp._extension import MODULE, NAME, PACKAGE_DIR, names_in
from torchddp._import_check import cuda_advice, parse_build_info, read_build_info
from torchddp.cli import checks
from torchddp.cli.checks import Variable, set_variables
from torchddp.cli.options import AsJson, Option
from torchddp.harness.launch import EXIT_BAD_ARGUMENT
from torchddp.harness.machine import available_cores, date_text, now, package_version
from torchddp.harness.model_names import MODEL_HELP

if TYPE_CHECKING:
    from torchddp.cli.balance import Balance

HELP = """Check the installation: versions, transports, environment variables, and whether they fit together.

Tries each transport with processes that reduce a tensor, which takes a few seconds.

With --model, also shows how Muon's updates of its matrices, and AdamW's of the rest, would be shared out among ranks.

Exit status 0: everything fits. 1: the extension does not load or was built for another version of torch, Python or
CUDA, or a TORCHDDP_* variable has an invalid value. An unavailable transport is not an error; the reason is printed.

\b
Examples:
  torchddp doctor
  python -m torchddp doctor
      the same, for this Python
  torchddp doctor --json
      for scripts and bug reports
  torchddp doctor --model gpt --world-size 8
      what each of eight ranks would own under torchddp.optim.OSS
"""
WIDTH = 16


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # "9.0"; empty if it does not work


@dataclass(frozen=True)
class Built:
    """The loaded extension's build info; empty strings where there is none."""

    version: str = ""
    torch: str = ""
    python: str = ""
    compiler: str = ""
    cuda: str = ""
    nccl: str = ""
    archs: str = ""
    file: str = ""  # the one that is loaded
    files: list[str] = field(default_factory=list)  # the package's


@dataclass(frozen=True)
class Running:
    python: str = ""
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    nccl: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    over_nccl: str = ""  # what ranks of this host do with large gradients, and why; empty without GPUs
    cores: int = 0
    cpu_capability: str = ""
    threads: int = 0  # of torch's operators, in each rank started from here
    ranks: int = 0  # on this host, from the launcher's environment; 0: unknown


@dataclass(frozen=True)
class Transport:
    name: str
    works: bool
    reason: str = ""  # why it does not work


@dataclass(frozen=True)
class Diagnosis:
    built: Built
    running: Running
    transports: list[Transport]
    variables: list[Variable]
    problems: list[str]
    hints: list[str]
    date: str = ""
    verdict: str = ""
    balance: Balance | None = None


def verdict(transports: Sequence[Transport], problems: Sequence[str]) -> str:
    if problems:
        return f"torchddp will not work here: {len(problems)} problem{'s' if len(problems) > 1 else ''}, see above."
    working = ", ".join(t.name for t in transports if t.works)
    return f"torchddp works here, over {working}." if working else "torchddp loads, but no transport works: see above."


def diagnose() -> Diagnosis:
    torch, extension = _module("torch"), _module(MODULE)
    built, running = _built(extension), _running(torch, extension)
    variables = set_variables()
    load_error = str(torchddp.import_error) if torchddp.import_error is not None else ""
    problems = [load_error] if load_error else []
    problems += [variable.problem for variable in variables if variable.problem]
    found = [] if load_error else hints(built, running)
    transports = _transports(built, running, load_error)
    return Diagnosis(built, running, transports, variables, problems, found, now(), verdict(transports, problems))


def installed_version() -> str:
    """The version of the extension, read from its file, or of the installed package if there is none."""
    return read_build_info(PACKAGE_DIR).get("version") or package_version("torchddp") or ""


def hints(built: Built, running: Running) -> list[str]:
    if built.cuda:
        return [
            f"GPU {gpu.name} has compute capability {gpu.capability}; the kernels were built for {built.archs}. "
            "On this GPU, torch's operators move gradients into buckets, with more launches."
            for gpu in running.gpus
            if gpu.capability and not has_kernels_for(built.archs, gpu.capability)
        ]
    if not built.torch or not running.cuda:
        return []
    return [
        f"torchddp's extension is a CPU build, but torch {running.torch} has CUDA {running.cuda}. CPU models are fine; "
        "gradients on a GPU are packed by torch's operators and reduced by the process group. "
        f"{cuda_advice(running.cuda)}"
    ]


def has_kernels_for(archs: str, capability: str) -> bool:
    """Whether code for `archs` ("80-real 90-real 100") runs on a GPU of compute capability "9.0".

    Machine code runs on later minor versions of its major one; PTX, which all but "-real" include, on all later ones.
    """
    major, minor = map(int, capability.split("."))
    for arch in re.findall(r"(\d+)(\d)[a-z]?(-real|-virtual)?", archs):
        arch_major, arch_minor, kind = int(arch[0]), int(arch[1]), arch[2]
        if kind != "-virtual" and arch_major == major and arch_minor <= minor:
            return True
        if kind != "-real" and (arch_major, arch_minor) <= (major, minor):
            return True
    return False


def _module(name: str) -> ModuleType | None:
    """The module, if it loads. Even an extension built for another torch may load."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _built(extension: ModuleType | None) -> Built:
    files = sorted(filter(NAME.fullmatch, names_in(PACKAGE_DIR)))
    if extension is None:
        return Built(version=installed_version(), files=files)
    return Built(file=str(extension.__file__), files=files, **parse_build_info(extension.build_info))


def _running(torch: ModuleType | None, extension: ModuleType | None) -> Running:
    running = Running(
        python=platform.python_version(),
        cores=available_cores(),
        cpu_capability=str(extension.cpu_capability()) if extension is not None else "",
    )
    if torch is None:
        return running
    return dataclasses.replace(
        running,
        threads=int(torch.get_num_threads()),
        ranks=_ranks_of_this_host(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        driver=_driver(),
        nccl=_nccl(torch),
        gpus=_gpus(torch),
        over_nccl=over_nccl(torch.cuda.device_count()) if extension is not None and extension.with_cuda else "",
    )


def _ranks_of_this_host() -> int:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if (value := os.environ.get(name, "")).isdecimal():
            return int(value)
    return 0


def _driver() -> str:
    """The CUDA version that the driver supports, and its own version: "CUDA 13.0, driver 580.65.06"."""
    parts = []
    with contextlib.suppress(OSError, AttributeError):  # there is no driver
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            parts.append(f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")
    with contextlib.suppress(OSError):
        parts.append(f"driver {Path('/sys/module/nvidia/version').read_text().strip()}")
    return ", ".join(parts)


def _nccl(torch: ModuleType) -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return ""  # a torch without NCCL


def over_nccl(gpus: int) -> str:
    """What ranks of this host would do, one for each GPU."""
    if gpus == 0:
        return ""
    from torchddp import _torch
    from torchddp.transport.nccl_choice import choose, may_use_nvls, may_use_sharp

    has_multicast = all(_torch.has_multicast(index) for index in range(gpus))
    choice = choose([gpus], nvls=may_use_nvls(has_multicast), sharp=may_use_sharp({}))
    return f"a rank on each GPU {choice}"


def _gpus(torch: ModuleType) -> list[Gpu]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        try:
            major, minor = torch.cuda.get_device_capability(index)
            gpus.append(Gpu(torch.cuda.get_device_name(index), f"{major}.{minor}"))
        except RuntimeError as error:  # the driver sees it, but it does not work
            reason = str(error).partition("\n")[0]
            gpus.append(Gpu(f"{index}: {reason}", ""))
    return gpus


def _transports(built: Built, running: Running, load_error: str) -> list[Transport]:
    """c10d and shm are always tried; nccl where there is a GPU."""
    if load_error:
        return [Transport(name, False, "torchddp does not load") for name in checks.PROBES]
    against_nccl = reason_against_nccl(built, running)
    names = [name for name in checks.PROBES if name != "nccl" or not against_nccl]
    if sys.stderr.isatty():
        print(f"trying the transports {', '.join(names)} ...", file=sys.stderr)
    failures = {name: checks.failure(name) for name in names}
    failures |= {"nccl": against_nccl} if against_nccl else {}
    return [Transport(name, not failures[name], failures[name]) for name in checks.PROBES]


def reason_against_nccl(built: Built, running: Running) -> str:
    if not built.cuda:
        return "torchddp was built without CUDA"
    if not running.nccl:
        return f"torch {running.torch} has no NCCL"
    return "" if running.gpus else f"torch sees no GPU ({running.driver or 'there is no driver'})"


def show(found: Diagnosis) -> Iterator[str]:
    yield from _section("built", _built_rows(found.built))
    yield from _section("running", _running_rows(found.running))
    yield from _section("transports", [(t.name, "works" if t.works else t.reason) for t in found.transports])
    remarks = [(v, v.problem or v.note) for v in found.variables]
    yield from _section("variables", [(v.name, f"{v.value!r}{remark and f': {remark}'}") for v, remark in remarks])
    if found.balance is not None:
        from torchddp.cli.balance import balance_rows, balance_title

        yield from _section(balance_title(found.balance), balance_rows(found.balance))
    yield from (f"problem: {problem}" for problem in found.problems)
    yield from (f"hint: {hint}" for hint in found.hints)
    yield found.verdict
    yield date_text(found.date)


def _section(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield title + ("" if rows else ": none set")
    # In a file or a pipe, lines have any length.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000
    width = max([WIDTH, *(len(name) + 1 for name, _ in rows)])
    for name, text in rows:
        lines = textwrap.wrap(text, max(20, columns - width - 2)) or [""]
        yield f"  {name:<{width}}" + f"\n{'':<{width + 2}}".join(lines)


def _built_rows(built: Built) -> list[tuple[str, str]]:
    if not built.torch:
        return [("torchddp", built.version or "unknown"), ("extensions", ", ".join(built.files) or "none")]
    return [
        ("torchddp", built.version),
        ("extension", built.file),
        ("for torch", built.torch),
        ("for Python", built.python),
        ("compiler", built.compiler),
        ("CUDA", f"{built.cuda}, NCCL {built.nccl}, for {built.archs}" if built.cuda else "none: a CPU build"),
    ]


def _running_rows(running: Running) -> list[tuple[str, str]]:
    cuda = f"{running.cuda}, NCCL {running.nccl or 'none'}" if running.cuda else "none: a CPU build of torch"
    return [
        ("Python", running.python),
        ("torch", running.torch or "does not load"),
        ("CUDA", cuda),
        ("driver", running.driver or "none"),
        ("GPUs", ", ".join(f"{gpu.name} ({gpu.capability or 'does not work'})" for gpu in running.gpus) or "none"),
        *([("over NCCL", running.over_nccl)] if running.over_nccl else []),
        ("cores", str(running.cores)),
        ("threads", _threads_text(running)),
        ("kernels", running.cpu_capability or "the extension does not load"),
    ]


def _threads_text(running: Running) -> str:
    if not running.threads:
        return "unknown: torch does not load"
    if running.ranks:
        return f"{running.threads} in each of {running.ranks} ranks"
    text = f"{running.threads} in each rank"
    if running.cores > 1:
        text += f"; for CPU models, set OMP_NUM_THREADS to the cores per rank ({running.cores // 2} for 2 ranks)"
    return text


def run(
    as_json: AsJson = False,
    model: Annotated[
        str, Option("--model", metavar="MODEL", help=f"Show what each rank would own of this model: {MODEL_HELP}.")
    ] = "",
    world_size: Annotated[int, Option("--world-size", metavar="N", min=1, help="Number of ranks for --model.")] = 2,
) -> int:
    balance = None
    if model and torchddp.import_error is None:
        from torchddp.cli.balance import balance_of  # which imports torch
        from torchddp.harness.variants import ArgumentError

        try:
            balance = balance_of(model, world_size)
        except ArgumentError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_BAD_ARGUMENT
    found = dataclasses.replace(diagnose(), balance=balance)
    if os.environ.get("LOCAL_RANK", "0") == "0" or found.problems:  # under torchrun, once a host
        print(json.dumps(dataclasses.asdict(found), indent=1) if as_json else "\n".join(show(found)))
    return 1 if found.problems else 0
