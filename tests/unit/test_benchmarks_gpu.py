"""Arithmetic and goals of the GPU benchmarks, without a GPU; tests/gpu/run.sh --dry-run runs the benchmarks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import trace
from benchmarks.cases import gpu, gpu_rows
from benchmarks.cases.gpu import field_of, gpu_result, known_options
from benchmarks.cases.gpu_rows import given_step, rows_of, split_by_call
from tests.gpu.overlap import Overlap, is_computation, overlap
from tests.harness import on_ranks
from tests.unit.benchmark_results import document
from tests.unit.helpers import assert_refused, printed
from torchddp.bench import cli, report
from torchddp.bench.cases import BenchCase, Job, Result
from torchddp.bench.registry import CASES
from torchddp.harness.launch import LaunchError
from torchddp.harness.variants import TORCH_DDP, TORCHDDP, Role, Variant, make_variants

GPU = {"name": "NVIDIA Thing", "compute_capability": "9.0", "driver": "1.2", "cuda": "13.0", "nccl": "2.28.9"}
FIELD = field_of(make_variants(TORCHDDP, (), (25,)))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    kept = dict(CASES)
    CASES["gpu"] = gpu.CASE
    yield
    CASES.clear()
    CASES.update(kept)


def device_event(category: str, name: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def parsed(*entries: dict[str, Any]) -> list[trace.DeviceEvent]:
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0, "args": {}}
    begin = {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 0.0, "id": 1}
    return trace.parse_trace({"traceEvents": [host, begin, *entries]})


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_device_events_and_their_overlap_are_read_from_a_trace() -> None:
    events = parsed(
        device_event("gpu_memset", "Memset (Device)", 7, 30.0, 1.0),
        device_event("kernel", "gemm", 7, 10.0, 5.0),
        device_event("gpu_memcpy", "Memcpy DtoD", 20, 20.0, 2.0),
    )
    found = [(event.kind, event.stream, event.end_us) for event in events]
    assert found == [("kernel", 7, 15.0), ("copy", 20, 22.0), ("fill", 7, 31.0)]
    assert trace.count(events, 2) == trace.Counts(kernels=0.5, copies=0.5, fills=0.5)
    events = parsed(
        device_event("kernel", "gemm", 7, 0.0, 10.0),
        device_event("kernel", "torchddp::pack", 20, 10.0, 1.0),
        device_event("kernel", NCCL, 20, 11.0, 10.0),
        device_event("kernel", "gemm", 7, 10.0, 5.0),
        device_event("kernel", "gemm", 9, 12.0, 5.0),
        device_event("kernel", NCCL, 7, 30.0, 4.0),
    )
    assert overlap(events) == Overlap(
        collectives=2, on_their_own_stream=1, begun_before_the_end=1, overlapped_us=6.0, total_us=14.0
    )
    of_one_rank = "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float> >(void*, void*, unsigned long)"
    (event,) = parsed(device_event("kernel", of_one_rank, 7, 0.0, 1.0))
    assert trace.is_collective(event) and not is_computation(event)


def test_options_that_torch_lacks_are_left_out() -> None:
    tuned = Variant("torch", Role.TORCH, TORCH_DDP, (("static_graph", True), ("no_such_option", True)))
    assert known_options(tuned).keywords == {"static_graph": True}
    (torch_tuned,) = (variant for variant in FIELD if variant.name == "torch tuned, cap 25")
    assert torch_tuned.keywords["gradient_as_bucket_view"] and torch_tuned.keywords["bucket_cap_mb"] == 25


def fake_model(name: str = "gpt2", device: str = "cuda") -> Result:
    """Local 10 ms; torch default +4, cap 25 +3, ours +0.6."""
    step_ms = 10.0 + np.array([0.0, 4.0, 3.0, 0.6, 0.5, 0.7])[:, None] + np.zeros((1, 40))
    raw = {"model": name, "title": "GPT-2", "parameters": 148, "gradient_bytes": 497759232, "step_ms": step_ms}
    work = [{"kernels": 100.0 + 10 * i, "copies": 1.0, "fills": 0.0} for i in range(len(FIELD))]
    raw |= {"host_ms": step_ms / 2, "work": work, "transports": [None] * len(FIELD), "gpu": GPU}
    return gpu_result(gpu.CASE, Job("gpu", (name,), FIELD, 1, 1.0, options={"device": device}), raw)


def test_the_report_shows_launches_and_goals_met_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.GOALS, "resnet50", 0.1)
    text = printed(report.render(document(fake_model("small"), fake_model("resnet50"))), 100)
    assert "NVIDIA Thing (compute capability 9.0), driver 1.2 · CUDA 13.0 · NCCL 2.28.9" in text
    assert "0.20 [0.20..0.20]" in text and "0.3 met" in text and "0.1 missed" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("torchddp default"))
    assert row[2:7] == ["10.6", "5.30", "0.600", "130", "1"]
    assert fake_model(device="cpu")["goal_ratio"] is None


def test_a_goal_within_noise_is_neither_met_nor_missed() -> None:
    result = fake_model("small")
    ratio = next(row["ratio_to_best_torch"] for row in result["variants"] if row["role"] == "ours")
    ratio.update(median=0.29, ci95_low=0.2, ci95_high=0.4)
    assert gpu.goal_text(result) == "0.3 unclear"
    ratio.update(median=0.2, ci95_low=0.1, ci95_high=0.25)
    assert gpu.goal_text(result) == "0.3 met"
    ratio.update(odd_rounds=ratio["rounds"] // 2)
    assert gpu.goal_text(result) == "0.3 unclear"


def test_a_model_that_fails_leaves_the_others_results(monkeypatch, capsys, tmp_path: Path):
    def launch(case: BenchCase, job: Job, *_: Any) -> list[dict[str, Any]]:
        if job.models == ("resnet50",):
            raise LaunchError("rank 0: out of memory")
        return [{"name": job.models[0]}]

    monkeypatch.setattr(BenchCase, "launch", launch)
    monkeypatch.setattr(gpu, "gpu_result", lambda case, job, raw: fake_model(raw["name"], "cpu"))
    path = tmp_path / "result.json"
    arguments = "--case gpu --set device=cpu --set backend=gloo --quick --json".split()
    assert cli.main([*arguments, str(path)], [gpu.CASE]) == 1
    kept = json.loads(path.read_text())
    assert [result["model"] for result in kept["results"]] == ["small", "gpt2"]
    assert kept["failures"] == ["resnet50: rank 0: out of memory"]
    assert capsys.readouterr().err == "error: resnet50: rank 0: out of memory\n"


def test_results_are_written_before_the_next_is_measured(monkeypatch, tmp_path: Path):
    path = tmp_path / "result.json"

    def run(*_: Any) -> Iterator[Result]:
        yield fake_model()
        assert len(json.loads(path.read_text())["results"]) == 1
        yield fake_model()

    assert cli.main(["--case", "gpu", "--json", str(path)], [replace(gpu.CASE, run=run)]) == 0
    assert len(json.loads(path.read_text())["results"]) == 2


def test_a_wrong_device_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = ["--set", "device=cpu", "--set", "backend=gloo"]
    for arguments, words in (
        ([], "; --set device=cpu --set backend=gloo runs without one."),
        (["--set", "device=cpu"], "NCCL does not support CPU tensors: use --set backend=gloo with --set device=cpu."),
        (["--set", "device=tpu"], "--set device: there is no 'tpu'; choose from cuda, cpu."),
        (["--set", "sequence=1"], "--set sequence: must be a whole number from 16 to 8192, not '1'."),
        (["--model", "mlp", *on_cpu], "The case gpu has the models small, resnet50, gpt2, not mlp."),
    ):
        assert_refused(lambda given: cli.main(given, [gpu.CASE]), ["--case", "gpu", *arguments], words, capsys)


def test_kernel_times_are_summed_by_call_and_compared_with_the_first_way() -> None:
    assert split_by_call([1.0, 2.0, 3.0, 4.0], 2).tolist() == [3.0, 7.0]
    for times_us in ([], [1.0, 2.0, 3.0]):
        with pytest.raises(RuntimeError, match=f"saw {len(times_us)} matching events in 2 equal calls"):
            split_by_call(times_us, 2)
    result = rows_of("1 MiB", {"theirs": np.full(9, 20.0), "torchddp": np.full(9, 5.0)}, 10**6)
    theirs, ours = result["rows"]
    assert theirs["speed"] is None and ours["speed"]["median"] == 4.0
    assert ours["us"]["median"] == 5.0 and ours["gb_per_s"]["median"] == pytest.approx(200.0)
    text = printed(gpu_rows.table({"case": "gpu_pack", "gpu": None, **result}))
    assert "gpu_pack · 1 MiB" in text and "4.00 [4.00..4.00]" in text and "1 (the first)" in text


@on_ranks(2)
def test_given_gradients_are_averaged_and_checked() -> None:
    gradients = [torch.full((5,), 8.0), torch.full((40_000,), 2.0)]
    given_step(gradients, 4)()
    with pytest.raises(RuntimeError, match="packed into the bucket, not reduced in place"):
        given_step(gradients, 4, in_place=True)
    gradients[0][0] = float("nan")  # equals nothing
    with pytest.raises(RuntimeError, match="gradient 0 of 2"):
        given_step(gradients, 4)
