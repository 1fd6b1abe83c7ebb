"""The cases `gpu` and `gpu_memory`: what a class adds to a step on a GPU, in time, launches and memory."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from benchmarks.cases.gpu_variants import Halving, field_of, known_options, registers, torch_lacks
from benchmarks.options import one_of, whole_number
from benchmarks.trace import Counts, count, record
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.bench.gradients import timed_result
from torchddp.bench.memory import MEASURED_STEPS, parse_bytes
from torchddp.bench.report import MAX_ODD_SHARE
from torchddp.bench.results import describe_variant, draw_bars, model_result, variants_table
from torchddp.bench.timing import (
    MIN_WARMUP_STEPS,
    Runner,
    check_gradients,
    over_ranks,
    timed_rounds,
    warm_up,
    wrap_copies,
)
from torchddp.harness.command import Display
from torchddp.harness.launch import LaunchError, Report
from torchddp.harness.networks import GPT2_VOCABULARY, SMALL_NUMEL, Classifier, Gpt, ManySmallTensors, convolution
from torchddp.harness.stats import summarize
from torchddp.harness.tables import MB, number, ratio_text
from torchddp.harness.variants import ArgumentError

# Upper bounds on our cost over the cost of torch's best.
GOALS = {"small": 0.3, "resnet50": 0.5, "gpt2": 0.5}
TRACED_STEPS = 3
OPTIONS: Mapping[str, Option] = {
    "device": Option("cuda", one_of(("cuda", "cpu")), "cuda, or cpu to see that the program runs."),
    "backend": Option("nccl", one_of(("nccl", "gloo")), "nccl, or gloo, with which ranks may share a GPU."),
    "sequence": Option(1024, whole_number(16, 8192), "Tokens per sequence of gpt2.", quick=64),
}

# --- the device ------------------------------------------------------------------------------------------------------


def gpu_job(case: BenchCase, settings: Settings) -> Job:
    """The case's job on its device. Raises ArgumentError for options that the ranks would fail with."""
    job = settings.job_of(case)
    device, backend = job.options["device"], job.options["backend"]
    if device == "cpu" and backend == "nccl":
        raise ArgumentError("NCCL does not support CPU tensors: use --set backend=gloo with --set device=cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        build = "has no GPU here" if torch.version.cuda else "is a CPU build"
        raise ArgumentError(f"torch {torch.__version__} {build}; --set device=cpu --set backend=gloo runs without one.")
    options = {**job.options, "quick": settings.quick}
    return replace(job, backend=backend, options=options, collective_timeout_s=60.0 + 2 * job.seconds)


def pick_device(job: Job) -> torch.device:
    """Assigns ranks to GPUs round-robin; with more ranks than GPUs, several share one."""
    if job.options["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def describe_gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def gpu_text(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return "On the CPU: this shows that the program runs, but says nothing about a GPU."
    chip = f"{gpu['name']} (compute capability {gpu['compute_capability']})"
    return f"{chip}, driver {gpu['driver']} · CUDA {gpu['cuda']} · NCCL {gpu['nccl']}"


class Clock:
    """Measures two times of one piece of work: until it was done, and until the host was free again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        """Waits until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """(until done, until the host was free) in ms, from an idle device. On a CPU they are the same."""
        self.wait()
        if self._device.type == "cuda":
            self._begin.record()
        start_ns = time.perf_counter_ns()
        work()
        host_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if self._device.type != "cuda":
            return host_ms, host_ms
        # The current stream has waited for work on other streams, or that work was not part of the step.
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end), host_ms


# --- the models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuModel:
    """A model that returns its loss, and its batches."""

    title: str
    build: Callable[[Job], nn.Module]
    make_batch: Callable[[Job, torch.Generator], Tensor]
    # How much gradients of two runs may differ, relative to the largest: sums may have another order, and bf16 has
    # about three significant digits.
    tolerance: float = 5e-2
    autocast: bool = True


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.relu(self.body(hidden) + self.shortcut(hidden))


class ResNet(Classifier):
    """torchvision's ResNet; by default ResNet-50, with 25.6 M parameters in 161 tensors."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        layers = [*convolution(3, width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        super().__init__(layers, channels, classes)


def _resnet50(job: Job) -> nn.Module:
    model = ResNet((1, 1), width=8, classes=10) if job.options["quick"] else ResNet()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _images(job: Job, generator: torch.Generator) -> Tensor:
    batch, side = (4, 32) if job.options["quick"] else (64, 224)
    return torch.randn(batch, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)


def _gpt2(job: Job) -> nn.Module:
    sizes = (256, 64, 2, 2) if job.options["quick"] else (GPT2_VOCABULARY, 768, 12, 12)
    vocabulary, width, depth, heads = sizes
    return Gpt(vocabulary, width=width, depth=depth, heads=heads, max_length=job.options["sequence"], tied=True)


def _tokens(job: Job, generator: torch.Generator) -> Tensor:
    batch, vocabulary = (2, 256) if job.options["quick"] else (8, GPT2_VOCABULARY)
    # One more token than the model sees: each token but the first is a target.
    return torch.randint(0, vocabulary, (batch, job.options["sequence"] + 1), generator=generator)


MODELS: dict[str, GpuModel] = {
    "small": GpuModel(
        "1000 small tensors",
        lambda job: ManySmallTensors(),
        lambda job, generator: torch.randn(SMALL_NUMEL, generator=generator),
        tolerance=1e-4,
        autocast=False,
    ),
    "resnet50": GpuModel("ResNet-50-like, bf16 autocast", _resnet50, _images),
    "gpt2": GpuModel("GPT-2, bf16 autocast", _gpt2, _tokens),
}


def make_batch(job: Job, name: str, index: int) -> Tensor:
    """This rank's batch. Ranks get different data, so that missing averages show."""
    return MODELS[name].make_batch(job, torch.Generator().manual_seed(job.seed + 1000 * dist.get_rank() + index))


# --- the runners -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GpuRunner(Runner):
    """A variant that is built and ready to step on the device."""

    clock: Clock
    precision: Callable[[], contextlib.AbstractContextManager[Any]]  # in which forward runs

    def step(self, batch: Tensor, world_size: int = 1) -> tuple[float, float]:
        """One forward and backward from an idle device; ms until done, and until the host was free."""
        self.module.zero_grad(set_to_none=True)
        self.clock.wait()
        if world_size > 1:
            dist.barrier()
        return self.clock.time(lambda: self._forward_backward(batch))

    def _forward_backward(self, batch: Tensor) -> None:
        with self.precision():
            loss = self.module(batch)
        loss.backward()

    def gradients(self) -> list[tuple[str, Tensor]]:
        found = super().gradients()
        if isinstance(self.module, Halving):
            return [(name, self.module.divisor * gradient) for name, gradient in found]
        return found

    def count(self, batch: Tensor) -> Counts:
        """The work that a step gives to the device."""
        return count(record(lambda: [self.step(batch) for _ in range(TRACED_STEPS)]), TRACED_STEPS)


def build_runners(job: Job, name: str, device: torch.device) -> list[GpuRunner]:
    """Each variant's wrapper around a copy of one model on the device, all in this process group."""
    torch.manual_seed(job.seed)
    original = MODELS[name].build(job).to(device)
    device_ids = [device.index] if device.type == "cuda" else None

    def wrap(cls: type, module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        wrapped: nn.Module = cls(module, device_ids=device_ids, **options)
        return wrapped

    def precision() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if MODELS[name].autocast else contextlib.nullcontext()

    modules = wrap_copies(original, job.variants, wrap)
    return [
        GpuRunner(*pair, clock=Clock(device), precision=precision) for pair in zip(job.variants, modules, strict=True)
    ]


# --- time ------------------------------------------------------------------------------------------------------------


def about(job: Job, name: str, runners: Sequence[GpuRunner], device: torch.device) -> dict[str, Any]:
    parameters = list(runners[0].module.parameters())
    return {
        "model": name,
        "title": MODELS[name].title,
        "parameters": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "gpu": describe_gpu(device),
    }


def measure(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Interleaved step times of all variants and their work per step; checks gradients before and after timing."""
    device = pick_device(job)
    runners = build_runners(job, name, device)
    batch, other_batch = (make_batch(job, name, index).to(device) for index in (0, 1))
    warm_up(runners, batch, job)
    # Not the warm-up's batch, so that a stale gradient is noticed.
    check_gradients(job, name, runners, other_batch, MODELS[name].tolerance)
    times_ms = timed_rounds(runners, batch, job, report)  # [clock, variant, round]
    check_gradients(job, name, runners, other_batch, MODELS[name].tolerance)
    step_ms, host_ms = over_ranks(times_ms)
    return {
        **about(job, name, runners, device),
        "step_ms": step_ms,
        "host_ms": host_ms,
        "work": [asdict(runner.count(batch)) for runner in runners],
        "registers": registers(device),
        "transports": [getattr(getattr(one.module, "reducer", None), "transport_name", None) for one in runners],
    }


def run(case: BenchCase, settings: Settings, display: Display) -> Iterator[Result]:
    """A launch for each model, so that one that fails leaves the others' results."""
    job = gpu_job(case, settings)
    if unknown := set(job.models) - set(MODELS):
        raise ArgumentError(f"The case {case.name} has the models {', '.join(MODELS)}, not {', '.join(unknown)}.")
    job = replace(job, variants=field_of(job))
    failures = []
    for model in job.models:
        display.start(f"{case.name}, {model}")
        try:
            (raw,) = case.launch(replace(job, models=(model,)), display)
        except LaunchError as error:
            failures.append(f"{model}: {error}")
        else:
            yield gpu_result(case, job, raw)
    if failures:
        raise LaunchError("; ".join(failures))


def gpu_result(case: BenchCase, job: Job, raw: dict[str, Any]) -> Result:
    """One model: steps, costs and ratios by device time; host time; device work per step."""
    result = timed_result(case, job.variants, raw, job.world_size)
    # Goals apply to one rank per GPU, not to ranks that share one.
    of_goal = job.world_size == 1 and job.options["device"] == "cuda"
    result |= {"goal_ratio": GOALS[raw["model"]] if of_goal else None, "torch_lacks": torch_lacks()}
    result |= {"gpu": raw["gpu"], "registers": raw["registers"]}
    for row, host_ms, work, transport in zip(
        result["variants"], raw["host_ms"], raw["work"], raw["transports"], strict=True
    ):
        row |= {"host_ms": summarize(host_ms), "work_per_step": work, "transport": transport}
    return result


def goal_text(result: Result) -> str:
    """Whether the goal is met, missed, or unclear (it lies in the median's 95% interval)."""
    goal = result["goal_ratio"]
    ratio = next(row["ratio_to_best_torch"] for row in result["variants"] if row["role"] == "ours")
    low, high = ratio["ci95_low"], ratio["ci95_high"]  # None: infinite
    if ratio["odd_rounds"] > MAX_ODD_SHARE * ratio["rounds"]:
        return f"{goal:g} unclear"
    if high is not None and high <= goal:
        return f"{goal:g} met"
    return f"{goal:g} missed" if low is None or low > goal else f"{goal:g} unclear"


def table(result: Result) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        work, costs = row["work_per_step"], "cost" in row
        return [
            number(row["step_ms"]["median"]),
            number(row["host_ms"]["median"]),
            number(row["cost"]["median"]) if costs else "",
            f"{work['kernels']:.0f}",
            f"{work['copies'] + work['fills']:.0f}",
            ratio_text(row["ratio_to_best_torch"]) if costs else "",
        ]

    headings = ("step\nms", "host\nms", "cost\nms", "kernels\na step", "copies,\nfills")
    found = variants_table(result, (*headings, "to torch's best\np50 [95% CI]"), cells)
    notes = [gpu_text(result["gpu"])]
    if result["goal_ratio"] is not None:
        notes.append(f"the goal of {goal_text(result)}")
    if result["torch_lacks"]:
        notes.append(f"This torch has no {', '.join(result['torch_lacks'])}; a newer torch's best may be faster.")
    if result["gpu"] is not None and not result["registers"]:
        notes.append("torch has no registered memory here, so its registered buckets are ordinary memory.")
    found.caption = Text("\n".join(notes), style="dim")
    return found


CASE = BenchCase(
    name="gpu",
    title="cost on a GPU (DDP step minus the same step without DDP, forward and backward)",
    models=tuple(MODELS),
    default_world_size=1,
    caps_mb=(1, 25, 100),
    options=OPTIONS,
    measure=measure,
    run=run,
    table=table,
    draw=draw_bars,
    note=(
        "gpu: medians, each step from an idle device. step: CUDA events; host: until backward() returned; cost: the "
        "step minus a nearby step without DDP. Kernels are counted by torch's profiler. registered: tuned, buckets in "
        "memory registered with NCCL (DDP_DISABLE_COMM_MEM=0). With one rank NCCL moves nothing: the cost is that of "
        "packing and launching; with 'NCCL halves', also of NCCL's kernel for each large gradient. Ranks that share a "
        "GPU show correctness and counts, not scaling."
    ),
)

# --- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Bytes after some steps of one variant. The driver counts the whole device, so no other program may use it."""
    device = pick_device(job)
    (runner,) = runners = build_runners(job, name, device)
    batch = make_batch(job, name, 0).to(device)
    for _ in range(MIN_WARMUP_STEPS):
        runner.step(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(MEASURED_STEPS):
        runner.step(batch)
    return {**about(job, name, runners, device), "bytes": bytes_of(device)}


def bytes_of(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"resident": parse_bytes(Path("/proc/self/status").read_text(), "VmRSS")}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved, peak = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return {"driver": total - free, "torch reserved": reserved, "torch peak": peak}


def run_memory(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    """Each variant in processes of its own, so that leftovers of one do not count for the next."""
    job = gpu_job(case, settings)
    variants = tuple(map(known_options, job.variants))
    raws = []
    for index, variant in enumerate(variants):
        display.start(case.name)
        display.update(variant.name, index, len(variants))
        raws += case.launch(replace(job, variants=(variant,)), display)
    rows = [{**describe_variant(variant), "bytes": raw["bytes"]} for variant, raw in zip(variants, raws, strict=True)]
    return [model_result(case.name, raws[0], job.world_size, rows, unit="MB", gpu=raws[0]["gpu"])]


def memory_table(result: Result) -> Table:
    first, *_ = result["variants"][0]["bytes"]

    def cells(row: dict[str, Any]) -> list[str | Text]:
        more = row["bytes"][first] - result["variants"][0]["bytes"][first]
        return [
            *(f"{each / MB:.1f}" for each in row["bytes"].values()),
            "" if row["role"] == "local" else f"{more / MB:.1f}",
        ]

    headings = [f"{name}\nMB" for name in result["variants"][0]["bytes"]]
    found = variants_table(result, (*headings, f"{first}, more\nthan no DDP, MB"), cells)
    found.caption = Text(gpu_text(result["gpu"]), style="dim")
    return found


def draw_memory(results: Sequence[Result]) -> Any:
    bars = [
        {**result, "variants": [{**row, "bytes": next(iter(row["bytes"].values()))} for row in result["variants"]]}
        for result in results
    ]
    return draw_bars(bars, "bytes", "MB after some steps", with_local=True)


MEMORY = replace(
    CASE,
    name="gpu_memory",
    title="memory of a training step on a GPU (one launch per variant)",
    models=("gpt2",),
    caps_mb=(25,),
    takes_caps=False,
    measure=measure_memory,
    run=run_memory,
    table=memory_table,
    summary=None,
    draw=draw_memory,
    note="gpu_memory: by the driver's count for the whole device, and by torch's allocator.",
)
