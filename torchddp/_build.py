"""Compiles the extension for the running torch into the user's cache: `torchddp build`, TORCHDDP_BUILD=1 at import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from torchddp._extension import CPU, built_dir, cache_folder, file_name, find_nvcc, is_private, kind_name, source_dir

STEP = re.compile(r"(\d+)/(\d+) ")
NOTES = ("torchddp: waiting ", "torchddp: torchddp ")  # of cmake/build_in_cache.py: shown at once
SHOWN_LINES = 60  # of what the compiler printed, after a failure


class BuildError(Exception):
    """The extension can't be compiled; the message is one sentence."""


def build(running: Mapping[str, str], kind: str = "") -> Path:
    """Compile the extension for these versions, unless the cache has it, and return its file.

    ``kind``: "cpu", "cuda", or "" for CUDA if torch has it and there is an nvcc. Prints progress on stderr. Of several
    processes that call it at once, one compiles and the others wait. An interruption, even SIGKILL, ends the compilers
    and leaves nothing behind. Raises :class:`BuildError`.
    """
    with_cuda = wants_cuda(running, kind)
    target = target_of(running, with_cuda)
    if not os.path.exists(target):
        began = time.monotonic()
        _compile(target, running, with_cuda)
        print(f"torchddp: compiled in {time.monotonic() - began:.0f} s: {target}", file=sys.stderr)
    if not is_private(target.parent):
        raise BuildError(f"others can write to {target.parent}, so nothing is loaded from there: chmod go-w it")
    return target


def wants_cuda(running: Mapping[str, str], kind: str) -> bool:
    if kind == "cuda" and not running["cuda"]:
        raise BuildError(f"torch {running['torch']} is a CPU build: it has no CUDA to compile for")
    return kind == "cuda" or (not kind and bool(running["cuda"] and find_nvcc()))


def target_of(running: Mapping[str, str], with_cuda: bool) -> Path:
    sources, folder = source_dir(), cache_folder(running)
    if sources is None:
        raise BuildError("this installation has no sources to compile: install torchddp from a wheel or a checkout")
    if folder is None:
        raise BuildError("there is no home directory for the compiled extension: set TORCHDDP_CACHE_DIR")
    if running["abi"] != "1":
        raise BuildError(f"torch {running['torch']} uses libstdc++'s old C++ ABI, which torchddp does not support")
    return folder / file_name(running["torch"], kind_name(running["cuda"]) if with_cuda else CPU)


def _compile(target: Path, running: Mapping[str, str], with_cuda: bool) -> None:
    sources, cache = source_dir(), built_dir()
    assert sources is not None and cache is not None
    program = [sys.executable, str(sources / "cmake" / "build_in_cache.py"), str(cache), str(target)]
    settings = {"TORCHDDP_CUDA": str(int(with_cuda)), "CUDACXX": find_nvcc() or "nvcc"}
    kind = f"CUDA {running['cuda']}" if with_cuda else "CPU"
    # Its standard input is how it learns that this process has ended.
    process = subprocess.Popen(
        program,
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",  # compilers quote what sources and folders are called
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        printed = _show(process.stdout, f"torchddp: compiling for torch {running['torch']} ({kind})")
    finally:
        process.stdin.close()
        code = process.wait()
    if code:
        *before, reason = printed or ["torchddp: the build ended without a word"]
        sys.stderr.write("".join(f"{line}\n" for line in before))
        raise BuildError(reason.removeprefix("torchddp: "))


def _show(output: IO[str], what: str) -> list[str]:
    """Show progress on stderr, in one line that changes on a terminal. Returns the last lines that aren't progress."""
    began, others = time.monotonic(), deque[str](maxlen=SHOWN_LINES)
    terminal = sys.stderr.isatty()
    print(f"{what}: about two minutes", end="" if terminal else "\n", file=sys.stderr, flush=True)
    for line in map(str.rstrip, output):
        if step := STEP.match(line):
            if terminal:
                text = f"{what}: step {step[1]} of {step[2]}, {time.monotonic() - began:.0f} s"
                print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)
        elif line.startswith(NOTES):
            print(f"{os.linesep if terminal else ''}{line}", file=sys.stderr, flush=True)
        elif line:
            others.append(line)
    if terminal:
        print(file=sys.stderr)
    return list(others)
