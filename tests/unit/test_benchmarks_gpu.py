"""Arithmetic and goals of the GPU benchmarks, without a GPU; tests/gpu/run.sh --dry-run runs the benchmarks."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import cli, leave, report, trace
from benchmarks.gpu import run as course
from benchmarks.gpu.cases import HOST_CASE, MODELS_CASE, OPTIONS_CASE, PACK_CASE
from benchmarks.gpu.duel import duel, split_by_call
from benchmarks.gpu.given import GivenStep
from benchmarks.gpu.results import duel_result, model_result
from benchmarks.gpu.run import Stage
from benchmarks.gpu.variants import known_options, make_field
from tests.harness import on_ranks
from tests.unit.benchmark_results import document
from tests.unit.helpers import printed
from torchddp.harness.launch import LaunchError
from torchddp.harness.variants import TORCHDDP, Role, Variant

GPU = {"name": "NVIDIA Thing", "compute_capability": "9.0", "driver": "1.2", "cuda": "13.0", "nccl": "2.28.9"}


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
    assert trace.overlap(events) == trace.Overlap(
        collectives=2, on_their_own_stream=1, begun_before_the_end=1, overlapped_us=6.0, total_us=14.0
    )
    of_one_rank = "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float> >(void*, void*, unsigned long)"
    (event,) = parsed(device_event("kernel", of_one_rank, 7, 0.0, 1.0))
    assert trace.is_collective(event) and not trace.is_computation(event)


def test_options_that_torch_lacks_are_left_out() -> None:
    tuned = Variant("torch", Role.TORCH, "a.B", (("static_graph", True), ("batched_grad_copy", True)))
    assert known_options(tuned, {"module", "static_graph"}).keywords == {"static_graph": True}
    for variant in make_field(TORCHDDP, (25,)):
        if variant.role is Role.TORCH and variant.options:
            assert variant.keywords["gradient_as_bucket_view"] and variant.keywords["bucket_cap_mb"] == 25


def fake_model(name: str = "gpt2", case: str = MODELS_CASE.name) -> dict[str, Any]:
    """Local 10 ms; torch default +4, cap 25 +3, ours +0.6."""
    variants = make_field(TORCHDDP, (25,))[:5]
    step_ms = 10.0 + np.array([0.0, 4.0, 3.0, 0.6, 0.5])[:, None] + np.zeros((1, 40))
    raw = {"model": name, "title": "GPT-2", "parameters": 148, "gradient_bytes": 497759232, "step_ms": step_ms}
    work = [{"kernels": 100.0 + 10 * i, "copies": 1.0, "fills": 0.0} for i in range(5)]
    transports = [None, None, None, "nccl", "nccl"]
    raw |= {"host_ms": step_ms / 2, "work": work, "transports": transports}
    return model_result(case, variants, raw, 1, ())


def test_the_report_ends_with_goals_met_and_missed() -> None:
    ours = "torchddp pack, times 1/2"
    times_us = {"copy": np.full(10, 100.0), ours: np.full(10, 125.0)}
    pack = duel_result(duel(PACK_CASE, "64 MiB in 9 gradients", times_us, bytes=10**8, goal={ours: 0.9}))
    run = document(fake_model("small"), fake_model(), pack, fake_model(case=OPTIONS_CASE))
    run |= {"failures": [], "settings": {"quick": False, "world_size": 1, "backend": "nccl"}}
    run["machine"] |= {"gpu": GPU}
    text = printed(report.render_end(run))
    goals = text[text.index("Goals") :]
    assert "0.20 [0.20..0.20]" in goals and "0.3 met" in goals and "0.5 met" in goals
    assert "0.80 [0.80..0.80]" in goals and "0.9 missed" in goals
    assert goals.count("gpt2") == 1  # other ways to train have no goal


def test_a_failed_stage_keeps_the_other_results(monkeypatch, capsys):
    def fails(seconds: float, display: Any) -> Any:
        raise LaunchError("rank 0: out of memory")

    good = Stage("good", lambda seconds, display: [{"kind": "model"}], lambda raws: [fake_model()])
    monkeypatch.setattr(course, "stages", lambda settings: [good, Stage("bad", fails, lambda raws: []), good])
    kept: list[tuple[int, list[dict[str, str]]]] = []
    monkeypatch.setattr(cli, "write_json", lambda _, found: kept.append((len(found["results"]), [*found["failures"]])))
    assert cli.main("--device cpu --backend gloo --quick --json result.json".split()) == 1
    failure = {"stage": "bad", "error": "rank 0: out of memory"}
    assert kept == [(1, []), (1, [failure]), (2, [failure])]
    assert capsys.readouterr().err == "error: failed: bad; the reasons are above\n"


@pytest.mark.parametrize(
    ("device", "limit_s", "words"),
    [("cpu", 0.1, "did not end within 0.1 s: it had not left the group"), ("tpu", 60, "ended with exit code 1: ")],
)
def test_a_program_that_hangs_or_fails_is_an_error(device, limit_s, words, monkeypatch):
    monkeypatch.setattr(leave, "LIMIT_S", limit_s)
    with pytest.raises(LaunchError, match=f"^a program using torch's class {words}"):
        leave.time_leaving(device, "gloo", 1.0, lambda done, total: None)


def test_kernel_times_are_summed_by_call_and_compared_with_the_first_implementation() -> None:
    assert split_by_call([1.0, 2.0, 3.0, 4.0], 2).tolist() == [3.0, 7.0]
    assert split_by_call([], 3).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="3 matching events in 2 equal calls"):
        split_by_call([1.0, 2.0, 3.0], 2)
    result = duel_result(duel(HOST_CASE, "title", {"theirs": np.full(9, 20.0), "ours": np.full(9, 5.0)}, bytes=10**6))
    theirs, ours = result["rows"]
    assert theirs["speed"] is None and ours["speed"]["median"] == 4.0
    assert ours["values"]["us"]["median"] == 5.0 and ours["values"]["GB/s"]["median"] == pytest.approx(200.0)


@on_ranks(2)
def test_given_gradients_are_averaged_and_checked() -> None:
    step = GivenStep([torch.full((5,), 8.0), torch.full((40_000,), 2.0)], divisor=4)
    step.check(2)
    assert len(step.model.reducer.plan.buckets) == 1
    step.model.reducer.set_divisor(lambda: 2)
    with pytest.raises(RuntimeError, match="gradient 0 of 2"):
        step.check(2)
    assert [weight.grad[0].item() for weight in step.model.module.weights] == [8.0, 2.0]
