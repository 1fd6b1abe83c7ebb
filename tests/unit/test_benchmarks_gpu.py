"""The GPU benchmarks without a GPU: their arithmetic, their tables, and the whole program on the CPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.gpu import cli, report, trace
from benchmarks.gpu.cases import MODELS_CASE, GpuJob
from benchmarks.gpu.machine import describe_gpu, first_line
from benchmarks.gpu.measure import build_runners
from benchmarks.gpu.models import MODELS, make_batch, make_model
from benchmarks.gpu.results import model_result
from benchmarks.gpu.run import Settings, seconds_each
from benchmarks.gpu.variants import known_options, make_field
from torchddp.bench.report import save_results
from torchddp.harness import machine
from torchddp.harness.variants import LOCAL, TORCHDDP, Role, Variant

GPU = {
    "name": "NVIDIA Thing",
    "compute_capability": "9.0",
    "driver": "1.2",
    "cuda": "13.0",
    "nccl": "2.28.9",
}


def printed(renderable: Any, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()


# --- traces ----------------------------------------------------------------------------------------------------------


def device_event(category: str, name: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def trace_of(*entries: dict[str, Any]) -> dict[str, Any]:
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0, "args": {}}
    begin = {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 0.0, "id": 1}
    return {"traceEvents": [host, begin, *entries]}


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_trace_gives_the_devices_events_in_order() -> None:
    events = trace.parse_trace(
        trace_of(
            device_event("gpu_memset", "Memset (Device)", 7, 30.0, 1.0),
            device_event("kernel", "gemm", 7, 10.0, 5.0),
            device_event("gpu_memcpy", "Memcpy DtoD", 20, 20.0, 2.0),
        )
    )
    assert [(event.kind, event.stream, event.end_us) for event in events] == [
        ("kernel", 7, 15.0),
        ("copy", 20, 22.0),
        ("fill", 7, 31.0),
    ]
    assert trace.count(events, 2) == trace.Counts(kernels=0.5, copies=0.5, fills=0.5)


def test_a_run_on_the_cpu_is_recorded_as_nothing() -> None:
    assert trace.record(lambda: torch.ones(3) + 1) == []


def test_overlap_counts_what_lies_in_the_computation() -> None:
    events = trace.parse_trace(
        trace_of(
            device_event("kernel", "gemm", 7, 0.0, 10.0),
            device_event("kernel", "torchddp::pack", 20, 10.0, 1.0),
            device_event("kernel", NCCL, 20, 11.0, 10.0),
            device_event("kernel", "gemm", 7, 10.0, 5.0),
            device_event("kernel", "gemm", 9, 12.0, 5.0),
            device_event("kernel", NCCL, 7, 30.0, 4.0),
        )
    )
    assert trace.overlap(events) == trace.Overlap(
        collectives=2, on_their_own_stream=1, begun_before_the_end=1, overlapped_us=6.0, total_us=14.0
    )


def test_a_collective_after_everything_does_not_overlap() -> None:
    events = trace.parse_trace(
        trace_of(device_event("kernel", "gemm", 7, 0.0, 10.0), device_event("kernel", NCCL, 20, 10.0, 5.0))
    )
    found = trace.overlap(events)
    assert (found.collectives, found.begun_before_the_end, found.overlapped_us) == (1, 0, 0.0)


# --- models and the field --------------------------------------------------------------------------------------------


def quick_job(**changes: Any) -> GpuJob:
    settings: dict[str, Any] = {"models": ("small",), "variants": (LOCAL,), "world_size": 1, "seconds": 0.1}
    settings |= {"device": "cpu", "quick": True, "sequence": 16}
    return GpuJob(MODELS_CASE.name, **{**settings, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_models_give_every_parameter_a_gradient(name: str) -> None:
    model = make_model(quick_job(), name)
    model(make_batch(quick_job(), name, rank=0, index=0)).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, parameter_name


def test_model_sizes_are_those_of_the_nets_they_are_named_after() -> None:
    job = quick_job(quick=False, sequence=1024)
    sizes = {}
    for name in ("resnet50", "gpt2"):
        with torch.device("meta"):
            sizes[name] = [p.numel() for p in make_model(job, name).parameters()]
    assert (len(sizes["resnet50"]), sum(sizes["resnet50"])) == (161, 25_557_032)
    assert (len(sizes["gpt2"]), sum(sizes["gpt2"])) == (148, 124_439_808)


def test_ranks_and_steps_see_different_data() -> None:
    batches = [make_batch(quick_job(), "resnet50", rank, index) for rank in (0, 1) for index in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])


def test_options_that_torch_does_not_know_are_left_out() -> None:
    tuned = Variant("torch", Role.TORCH, "a.B", (("static_graph", True), ("batched_grad_copy", True)))
    assert known_options(tuned, {"module", "static_graph"}).keywords == {"static_graph": True}
    for variant in make_field(TORCHDDP, (25,)):
        if variant.role is Role.TORCH and variant.options:
            assert variant.keywords["gradient_as_bucket_view"] and variant.keywords["bucket_cap_mb"] == 25


def test_a_step_returns_both_times_and_leaves_gradients() -> None:
    (runner,) = build_runners(quick_job(), "small", torch.device("cpu"))
    batch = make_batch(quick_job(), "small", 0, 0)
    until_done_ms, until_free_ms = runner.step(batch)
    assert until_done_ms > 0 and until_free_ms > 0
    assert all(gradient is not None for _, gradient in runner.gradients())
    assert runner.transport is None


# --- the report ------------------------------------------------------------------------------------------------------


def fake_model() -> dict[str, Any]:
    """Local 10 ms; torch default +4, cap 25 +3, ours +0.6."""
    variants = make_field(TORCHDDP, (25,))
    step_ms = 10.0 + np.array([0.0, 4.0, 3.0, 0.6, 0.5])[:, None] + np.zeros((1, 40))
    raw = {"model": "gpt2", "title": "GPT-2", "parameters": 148, "gradient_bytes": 497759232, "step_ms": step_ms}
    work = [{"kernels": 100.0 + 10 * i, "copies": 1.0, "fills": 0.0} for i in range(5)]
    transports = [None, None, None, "nccl", "nccl"]
    return model_result(variants, {**raw, "host_ms": step_ms / 2, "work": work, "transports": transports}, 1)


def document(gpu: dict[str, Any] | None, *results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2030-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.gpu",
        "machine": {**machine.describe_machine(), "gpu": gpu},
        "settings": {"quick": False, "world_size": 1},
        "results": list(results),
    }


def test_the_report_fits_80_columns_and_ends_with_the_goals() -> None:
    text = printed(report.render(document(GPU, fake_model())))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    goals = text[text.index("Goals") :]
    assert "cost / torch's best, gpt2" in goals and "nccl" in goals
    assert "0.20 [0.20..0.20]" in goals and "0.3 met" in goals
    assert "NVIDIA Thing" in text and "2.28.9" in text and "130" in text  # kernels of our row


def test_without_a_gpu_no_goal_is_judged() -> None:
    text = printed(report.render(document(None, fake_model())))
    assert "Goals" not in text and "0.3 met" not in text
    assert "nothing about a GPU" in text


def test_files_are_named_after_the_gpu(tmp_path: Path) -> None:
    written = save_results(document(GPU, fake_model()), tmp_path)
    assert sorted(path.name for path in written) == [f"2030-01-02-gpu-nvidia-thing.{kind}" for kind in ("json", "png")]
    assert json.loads(written[0].read_text())["machine"]["gpu"] == GPU


def test_a_cpu_describes_no_gpu() -> None:
    assert describe_gpu(torch.device("cpu")) is None
    assert first_line("\n 580.1 \n580.1\n") == "580.1" and first_line("") is None


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope"], "There is no model 'nope'; choose from small, resnet50, gpt2."),
        (["--device", "tpu"], "There is no device 'tpu'"),
        (["--backend", "mpi"], "There is no backend 'mpi'"),
        (["--device", "cpu"], "use --backend gloo with --device cpu."),
        (["--sequence", "1"], "--sequence wants 16 to 8192 tokens, not 1."),
        (["--seconds", "0"], "above 0 and up to 3600, not 0."),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "--device cpu runs the program without one." in capsys.readouterr().err


def test_the_budget_is_shared_between_the_models() -> None:
    common: dict[str, Any] = {"seconds": 100.0, "world_size": 1, "backend": "gloo", "device": "cpu", "caps_mb": (25,)}
    common |= {"sequence": 64, "quick": True, "seed": 0}
    assert seconds_each(Settings(models=("small", "gpt2"), **common)) == pytest.approx(30.0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.thorough
def test_the_whole_program_runs_on_the_cpu(world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--backend", "gloo", "--quick", "--seconds", "0.5", "--json", str(path)]
    arguments += ["--world-size", str(world_size)] + ([] if world_size == 1 else ["--model", "resnet50"])
    assert cli.main(arguments) == 0
    assert "nothing about a GPU" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert saved["machine"]["gpu"] is None
    assert [result["model"] for result in saved["results"]] == (
        ["small", "resnet50", "gpt2"] if world_size == 1 else ["resnet50"]
    )
    for result in saved["results"]:
        assert result["world_size"] == world_size
        for row in result["variants"]:
            assert row["step_ms"]["median"] > 0 and row["host_ms"]["median"] > 0
            assert row["work_per_step"] == {"kernels": 0.0, "copies": 0.0, "fills": 0.0}
            assert (row["transport"] is not None) == (row["role"] == "ours")
