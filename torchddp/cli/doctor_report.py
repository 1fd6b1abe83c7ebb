"""Prints a diagnosis for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from torchddp.cli.diagnosis import Built, Diagnosis, Running

WIDTH = 16


def show(found: Diagnosis, console: Console) -> None:
    _section(console, "built", _built_rows(found.built))
    _section(console, "running", _running_rows(found.running))
    _section(
        console, "transports", [(t.name, "[green]works[/]" if t.works else escape(t.reason)) for t in found.transports]
    )
    _section(console, "variables", [(v.name, escape(_variable(v.value, v.problem or v.note))) for v in found.variables])
    for problem in found.problems:
        console.print(f"[red]problem[/]: {escape(problem)}")
    if not found.problems:
        console.print("[green]no problems[/]")


def _section(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/]" + ("" if rows else ": none is set"))
    width = max([WIDTH, *(len(name) + 1 for name, _ in rows)])
    for name, text in rows:
        console.print(f"  {name:<{width}}{text}")


def _built_rows(built: Built) -> list[tuple[str, str]]:
    if not built.torch:
        files = ", ".join(built.files)
        return [("torchddp", escape(built.version or "unknown")), ("extension", escape(files or "none"))]
    cuda = f"{built.cuda}, NCCL {built.nccl}, for {built.archs}" if built.cuda else "none: a CPU build"
    return [
        ("torchddp", escape(built.version)),
        ("for torch", escape(built.torch)),
        ("for Python", escape(built.python)),
        ("compiler", escape(built.compiler)),
        ("CUDA", escape(cuda)),
    ]


def _running_rows(running: Running) -> list[tuple[str, str]]:
    gpus = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in running.gpus)
    cuda = f"{running.cuda}, NCCL {running.nccl or 'none'}" if running.cuda else "none: a CPU build of torch"
    rows = [("Python", running.python), ("torch", running.torch or "does not load"), ("CUDA", cuda)]
    rows += [("driver", running.driver or "none"), ("GPUs", gpus or "none")]
    rows += [("cores", str(running.cores)), ("kernels", running.cpu_capability or "the extension does not load")]
    return [(name, escape(text)) for name, text in rows]


def _variable(value: str, remark: str) -> str:
    return f"{value!r}: {remark}" if remark else repr(value)
