"""The constructor's own arguments: few, declared once, with their former names."""

import math

import pytest
import torch

import torchddp
from tests.harness import on_ranks
from tests.models import Mlp, seeded
from torchddp import DDP, Checks, Precision
from torchddp.ddp.checks import OFF
from torchddp.ddp.former_names import FORMER
from torchddp.diagnose import monitor
from torchddp.optim import OSS

pytestmark = pytest.mark.beyond_torch("its own arguments")
VALUES = {
    "wire_dtype": torch.bfloat16,
    "reduce_dtype": torch.float32,
    "main_grads": torch.float32,
    "main_grads_as": "grad",
    "find_nonfinite": "raise",
    "check_parameters_every": 7,
    "stall_report_s": 20,
    "gradient_stats": True,
    "zero_weights": "zeros",
}


@on_ranks(1)
def test_former_names_set_the_fields(rank):
    assert VALUES.keys() == FORMER.keys()
    for name, value in VALUES.items():
        argument, field = FORMER[name]
        also = {"main_grads": torch.float32} if name == "main_grads_as" else {}
        with pytest.warns(FutureWarning, match=rf"{name}= is deprecated: pass {argument}=torchddp\.\w+\({field}="):
            model = DDP(seeded(Mlp), transport="shm", **{name: value}, **also)
        assert getattr(getattr(model._options, argument), field) == value
    with pytest.warns(FutureWarning, match="adopt_large_gradients=False has no effect"):
        DDP(seeded(Mlp), adopt_large_gradients=False)
    with pytest.warns(FutureWarning, match="stall_report_s"):
        optimizer = OSS((module := seeded(Mlp)).parameters(), torch.optim.SGD, lr=0.1)
        assert torchddp.ShardedDataParallel(module, optimizer, stall_report_s=9)._options.checks.stall_report == 9
    with pytest.warns(FutureWarning, match="gradient_stats"):
        torchddp.replicate(seeded(Mlp), gradient_stats=True)
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="got both checks='off' and find_nonfinite=True"):
        DDP(seeded(Mlp), checks="off", find_nonfinite=True)


@pytest.mark.skipif(not hasattr(torch.nn.parallel.DistributedDataParallel, "finalize_backward"), reason="torch < 2.15")
@on_ranks(1)
def test_arguments_and_methods_new_in_torch_2_15(rank):
    model = DDP(seeded(Mlp), lazy_bucket_allocation=True)
    with pytest.raises(RuntimeError, match="is not supported: gradients are final after backward"):
        model.require_manual_backward_finalization = True
    model.require_manual_backward_finalization = False  # as it is
    assert not model.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match="is not supported"):
        model.finalize_backward()


@on_ranks(1)
def test_wrong_arguments_are_explained(rank):
    module = seeded(Mlp)
    for call, error, words in (
        (lambda: DDP(Mlp), TypeError, r"got the class Mlp itself: pass an instance, DistributedDataParallel\(Mlp\("),
        (lambda: DDP([module]), AttributeError, r"wraps a torch\.nn\.Module, got list$"),
        (lambda: DDP(module, gradient_as_bucket_view="x"), TypeError, "must be True, False or None, got 'x'"),
        (lambda: DDP(module, static_graph=None), TypeError, "static_graph must be True or False, got None"),
        (lambda: DDP(module, transprot="shm"), TypeError, r"keyword argument 'transprot'. Did you mean 'transport'\?"),
        (lambda: torchddp.replicate(module, mixed_precision=None), TypeError, "use mp_policy="),
        (lambda: torchddp.Checks(stall=5), TypeError, r"argument 'stall'. Did you mean 'stall_report'\?"),
        (lambda: torchddp.Checks(sel=5), TypeError, "argument 'sel'; it takes nonfinite, parameters_every"),
        (lambda: torchddp.Precision(wired=None), TypeError, r"argument 'wired'. Did you mean 'wire'\?"),
        (lambda: torchddp.replicate(module, find_unusd_parameters=True), TypeError, "Did you mean 'find_unused_param"),
        (lambda: DDP(module, precision=torch.float32), TypeError, r"must be a torchddp\.Precision or None, got torch"),
        (lambda: DDP(module, checks="all"), TypeError, "must be a torchddp.Checks, \"off\" or None, got 'all'"),
        (lambda: DDP(module, timeout="30"), TypeError, "timeout must be a number of seconds, a datetime.timedelta"),
        (lambda: DDP(module, timeout=-1), ValueError, "timeout"),
        (lambda: torchddp.replicate(module, precision=Precision(reduce=torch.float32)), ValueError, "PrecisionPolicy"),
        (lambda: torchddp.replicate(module, mesh="dp"), TypeError, "mesh must be a DeviceMesh or None, got 'dp'"),
        (lambda: DDP(module, device_mesh="dp"), AttributeError, "device_mesh must be a DeviceMesh or None, got 'dp'"),
        (lambda: DDP(module, mixed_precision=torch.half), AttributeError, "mixed_precision must be a _Mixed"),
        (lambda: DDP(module, device_ids=0), TypeError, "device_ids must be a list of one device, or None; got 0"),
        (lambda: DDP(module, device_ids=[0]), ValueError, r"^device_ids=\[0\] is for a model on a GPU, but this"),
        (lambda: DDP(Mlp().to("meta")), RuntimeError, r"on the meta device, .* module\.to_empty\(device="),
        (lambda: DDP(module, bucket_cap_mb=math.inf), ValueError, "must be a positive number of MiB, got inf"),
        (lambda: DDP(module, bucket_cap_mb_list=5), TypeError, "must be a list of numbers of MiB, or None; got 5"),
        (lambda: DDP(module, transport=None), ValueError, "transport must be 'auto', .*, got None"),
        (lambda: DDP(module, transport="gloo"), ValueError, "got 'gloo'. 'c10d' uses the process group"),
        (lambda: DDP(module, transport=[]), ValueError, r"transport must be 'auto', .*, got \[\]"),
        (
            lambda: DDP(module, checks=Checks(traps="no")),
            TypeError,
            r"Checks\(traps=\) must be True or False, got 'no'",
        ),
        (lambda: DDP(module).register_comm_hook(None, "int8"), TypeError, "a name goes into the argument comm_hook="),
    ):
        with pytest.raises(error, match=words):
            call()
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
    for wrapped, options, error, words in (
        (None, {}, AttributeError, r"ShardedDataParallel wraps a torch\.nn\.Module, got NoneType"),
        (Mlp, {}, TypeError, r"pass an instance, ShardedDataParallel\(Mlp\("),
        (module, {"process_group": -100}, TypeError, r"that this rank is in; new_group\(\) has left it out"),
        (module, {"reduce_fp16": "no"}, TypeError, "reduce_fp16 must be True or False, got 'no'"),
        (module, {"broadcast_buffers": "no"}, TypeError, "broadcast_buffers must be True or False, got 'no'"),
    ):
        with pytest.raises(error, match=words):
            torchddp.ShardedDataParallel(wrapped, optimizer, **options)
    for checks in (Checks(nonfinite=True), Checks(parameters_every=2), Checks(gradient_stats=True)):
        with pytest.raises(ValueError, match="doesn't work with ShardedDataParallel"):
            torchddp.ShardedDataParallel(module, optimizer, checks=checks)


def test_a_forgotten_process_group_is_explained():
    with pytest.raises(ValueError, match=r'has not been initialized[^$]+dist\.init_process_group\("gloo"\)'):
        DDP(seeded(Mlp))
    with pytest.raises(TypeError, match="the class Mlp itself"):
        DDP(Mlp)


@pytest.mark.parametrize("by", ["argument", "variable"])
@on_ranks(2)
def test_checks_can_be_turned_off(rank, monkeypatch, by):
    """No observer, no thread, no exchange of numbers, whatever the program asks for."""
    if by == "variable":
        monkeypatch.setenv("TORCHDDP_CHECKS", "0")
    asked_for = "off" if by == "argument" else Checks(nonfinite="raise", parameters_every=1, stall_report=10)
    model = DDP(seeded(Mlp), checks=asked_for)
    assert list(model.observers) == [] and model._options.checks == OFF
    assert not monitor._monitors
    with pytest.raises(RuntimeError, match="nonfinite"):
        model.nonfinite()
    assert not model.session._watch.in_doubt


def test_the_variable_is_checked(monkeypatch):
    monkeypatch.setenv("TORCHDDP_CHECKS", "no")
    with pytest.raises(ValueError, match=r"TORCHDDP_CHECKS must be 0 \(no checks\), or 1 or empty, got 'no'"):
        DDP(torch.nn.Linear(2, 2))
