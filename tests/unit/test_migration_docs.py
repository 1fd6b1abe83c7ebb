"""docs/migration.md and docs/torch_features.md list every argument and name only APIs and files that exist."""

import inspect
import pkgutil
import re

import pytest
import torch

import torchddp
from tests.pages import PAGE, rows, sections, spans
from tests.parity.compare import TorchDDP
from torchddp.comm_hooks import NAMES
from torchddp.optim import OSS
from torchddp.sync import DDPSyncStrategy, accumulate, even_batches

TORCH_FEATURES = PAGE.parent / "torch_features.md"
# Arguments from the sources of apex, fairscale and horovod, which are not installed here.
APEX = """module message_size delay_allreduce shared_param allreduce_trigger_params retain_allreduce_buffers
    allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average gradient_predivide_factor
    gradient_average_split_factor prof"""
SHARDED = """module sharded_optimizer process_group broadcast_buffers sync_models_at_startup reduce_buffer_size
    auto_refresh_trainable reduce_fp16 warn_on_trainable_params_changed"""
OSS_ARGUMENTS = "params optim group broadcast_buffer_size broadcast_fp16 force_broadcast_object"
HOROVOD = """optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups
    groups sparse_as_dense process_set"""


def arguments_of(*callables):
    return {name for one in callables for name in inspect.signature(one).parameters}


OURS = arguments_of(torchddp.DDP, torchddp.ShardedDataParallel, OSS, accumulate, even_batches)


def named_in(section, heading):
    """Arguments in the first column of the table with this heading."""
    table = sections()[section].split(heading)[1].split("\n\n")[0]
    return {re.split(r"[=(]", span)[0] for first, _ in rows(table) for span in spans(first)}


def test_every_argument_has_a_row():
    for section, heading, arguments in (
        ("From torch.nn.parallel.DistributedDataParallel", "| argument |", arguments_of(TorchDDP)),
        ("From apex.parallel", "| argument of DistributedDataParallel |", set(APEX.split())),
        ("From FairScale", "| argument of ShardedDataParallel |", set(SHARDED.split())),
        ("From FairScale", "| argument of OSS |", set(OSS_ARGUMENTS.split())),
        ("From Horovod", "| argument of DistributedOptimizer |", set(HOROVOD.split())),
    ):
        assert arguments - named_in(section, heading) == set(), section


def test_arguments_listed_as_unchanged_exist_in_torchddp():
    found = 0
    for section, ours in (
        ("From torch.nn.parallel.DistributedDataParallel", arguments_of(torchddp.DDP) | set(dir(torchddp.DDP))),
        ("From FairScale", arguments_of(torchddp.ShardedDataParallel, OSS) | set(dir(torchddp.ShardedDataParallel))),
    ):
        for first, here in rows(sections()[section]):
            if not here.startswith(("the same", "a number means the same", "works")):
                continue
            for span in spans(first):
                name = re.split(r"[=(]", span.removeprefix("OSS.").removeprefix("ShardedDataParallel."))[0]
                if name.isidentifier() and name != "lr":
                    found += 1
                    assert name in ours or hasattr(OSS, name), f"{section}: {name}"
    assert found > 25


def test_named_arguments_methods_and_values_exist():
    """`name=value` in the column "here" is an argument of torchddp, or of the torch function named in that cell."""
    seen = set()
    for section, text in sections().items():
        for _, here in rows(text):
            for span in spans(here) if section != "What went" else ():
                for name in re.findall(r"\b(\w+)=", span):
                    seen.add(name)
                    torchs = "torch.nn.Embedding" in span or span in ("use_reentrant=False", "async_op=True")
                    assert torchs or name in OURS, f"{name} in `{span}`"
    assert {"comm_hook", "sync", "bucket_cap_mb", "transport", "process_group"} <= seen
    names = set()
    for span in spans(PAGE.read_text().partition("## What went")[0]):
        names.update(re.findall(r"\b(?:torchddp|torch)(?:\.\w+)+", span))
        for method in re.findall(r"\bmodel\.(\w+)\(", span):
            assert hasattr(torchddp.DDP, method), method
    assert len(names) > 20
    for name in sorted(names):
        pkgutil.resolve_name(name)
    text = PAGE.read_text()
    assert set(re.findall(r'comm_hook="(\w+)"', text)) <= set(NAMES)
    assert set(re.findall(r'sync="(\w+)"', text)) <= {strategy.value for strategy in DDPSyncStrategy}
    assert set(re.findall(r'transport="(\w+)"', text)) <= {"auto", "c10d", "shm", "nccl"}
    assert inspect.signature(OSS).parameters["optim"].default is torch.optim.AdamW
    assert "filter_params_fn" not in inspect.signature(OSS.clip_grad_norm).parameters
    for function in ("broadcast_object_list", "all_gather_object", "all_reduce", "all_gather_into_tensor"):
        assert hasattr(torch.distributed, function), function


@pytest.mark.parametrize("page", [PAGE, TORCH_FEATURES], ids=lambda page: page.name)
def test_named_files_exist(page):
    for name in re.findall(r"(?:tests|examples)/[\w/]+\.py", page.read_text()):
        assert (page.parents[1] / name).exists(), name


def test_named_dynamo_modes_and_model_methods_exist():
    text = TORCH_FEATURES.read_text()
    modes = {"ddp_optimizer", "no_optimization", "python_reducer", "python_reducer_without_compiled_forward"}
    assert modes <= set(re.findall(r'`"(\w+)"`', text))
    for mode in modes:
        with torch._dynamo.config.patch(optimize_ddp=mode):
            assert torch._dynamo.utils.get_optimize_ddp_mode() == mode, mode
    for name in re.findall(r"`model\.(\w+)`", text):
        assert hasattr(torchddp.DDP, name), name
