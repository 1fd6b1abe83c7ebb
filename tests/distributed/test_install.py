"""torchddp.install() on two ranks: whoever wraps a model gets ours, and the weights are those of torch's class."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests import framework
from tests.harness import on_ranks
from tests.models import Mlp, seeded

ROOT = Path(__file__).resolve().parents[2]


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded(lambda: Mlp(dtype=dtype))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS = {
    "attribute": lambda module: torch.nn.parallel.DistributedDataParallel(module),
    "other attribute": lambda module: torch.nn.parallel.distributed.DistributedDataParallel(module),
    "name": lambda module: framework.DDP(module),
    "default argument": lambda module: framework.wrap(module),
    "dict": lambda module: framework.CLASSES["ddp"](module),
    "partial": lambda module: framework.make(module),
    "torch's arguments": lambda module: framework.wrap(
        module, device_ids=None, bucket_cap_mb=25, gradient_as_bucket_view=False, check_reduction=True
    ),
}


@on_ranks(2)
def test_every_way_to_the_class_makes_ours_with_torchs_weights(rank):
    expected = framework.train(TorchDDP(net()), rank)
    for name, wrap in WAYS.items():
        before = torchddp.finished_steps()
        with torchddp.install():
            model = wrap(net())
            assert type(model) is torchddp.DDP, name
            assert same(framework.train(model, rank), expected), name
        assert torchddp.finished_steps() == before + 3, name
        assert type(wrap(net())) is TorchDDP, name


@on_ranks(2)
def test_models_of_both_kinds_go_on_across_the_switch(rank):
    torchs = TorchDDP(net())
    first = framework.train(torchs, rank)
    with torchddp.install():
        assert isinstance(torchs, framework.DDP) and type(torchs) is TorchDDP
        ours = framework.wrap(net())
        for made in (copy.deepcopy(torchs), pickle.loads(pickle.dumps(torchs))):
            assert type(made) is TorchDDP  # what it is, is what its copy is
        file = io.BytesIO()
        torch.save(ours, file)
    assert isinstance(ours, TorchDDP) and same(framework.train(ours, rank), first)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is torchddp.DDP and same(framework.train(loaded, rank), first)


@on_ranks(2)
def test_defaults_reach_the_class_and_the_callers_words_win(rank):
    with torchddp.install(transport="c10d", comm_hook="bf16"):
        for _ in range(2):  # each model has a hook of its own
            model = framework.wrap(net(torch.float32))
            assert model.session.options.transport == "c10d" and len(model._comm_hooks) == 1
        model = framework.wrap(net(), transport="shm", comm_hook=None)
        assert model.session.options.transport == "shm" and not model._comm_hooks

        class Derived(TorchDDP):
            pass

        assert Derived(net(torch.float32)).session.options.transport == "c10d"

    with torchddp.install(gradient_as_bucket_view=True, bucket_cap_mb=3, device_ids=None, dim=0):
        model, by_place = framework.wrap(net()), torch.nn.parallel.DistributedDataParallel(net(), None, None, 0)
        assert model.session.options.gradient_as_bucket_view and by_place.session.options.gradient_as_bucket_view
        assert model.bucket_bytes_cap == 3 * 2**20
        assert framework.wrap(net(), bucket_cap_mb=7).bucket_bytes_cap == 7 * 2**20
        assert not framework.wrap(net(), gradient_as_bucket_view=False).session.options.gradient_as_bucket_view


@on_ranks(2)
def test_classes_derived_from_torchs(rank):
    expected = framework.train(TorchDDP(net()), rank)
    with torchddp.install():

        class Meanwhile(TorchDDP):
            def __init__(self, module, answer):
                super().__init__(module)
                self.answer = answer

        class ByName(TorchDDP):
            def __init__(self, module):
                TorchDDP.__init__(self, module)

        with pytest.raises(TypeError, match=r"ByName was derived.*call super\(\).__init__"):
            ByName(net())
        assert not isinstance(framework.DerivedBefore(net()), torchddp.DDP)
    before = torchddp.finished_steps()
    model = Meanwhile(net(), 42)
    assert model.answer == 42 and isinstance(model, torchddp.DDP)
    assert same(framework.train(model, rank), expected) and torchddp.finished_steps() == before + 3


@on_ranks(2)
def test_what_torch_makes_of_its_class_itself(rank):
    def train_replicated():
        module = replicate(net())
        for _ in range(2):
            module(torch.full((3, 8), float(rank + 1), dtype=torch.float64)).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = train_replicated()
    before = torchddp.finished_steps()
    with torchddp.install():
        assert same(train_replicated(), expected)
    assert torchddp.finished_steps() == before + 2


# --- whole programs, under torchrun ---

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
from tests import framework
from tests.models import Mlp, seeded
assert sys.argv[1:2] == ["--out"], sys.argv
model = DDP(seeded(Mlp))
parameters = framework.train(model, dist.get_rank())
if dist.get_rank() == 0:
    torch.save(parameters, sys.argv[2])
    print(type(model).__module__)
# With torch's class the last work dies on gloo's thread, and needs Python for it: at exit that would be too late.
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A program, and the same with an import of torchddp at the top."""
    made = tmp_path_factory.mktemp("install")
    (made / "program.py").write_text(SCRIPT)
    (made / "importing.py").write_text("import torchddp\n" + SCRIPT)
    return made


def torchrun(folder, *command, **environment):
    """What rank 0 prints, and the parameters it has saved."""
    out = folder / "parameters.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHDDP_", "PYTHON"))}
    clean |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, *launcher, *command, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=clean, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, torch.load(out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_unmodified_programs_under_torchrun(folder):
    plain, expected = torchrun(folder, "program.py")
    assert plain.stdout.strip() == TorchDDP.__module__ and "torchddp" not in plain.stderr
    ways = {
        "variable": (["importing.py"], {"TORCHDDP_INSTALL": "1"}),
        "run, a script": (["-m", "torchddp.run", "program.py"], {}),
        "run, a module": (["-m", "torchddp.run", "-m", "program"], {}),
    }
    for name, (command, environment) in ways.items():
        done, parameters = torchrun(folder, *command, **environment)
        assert done.stdout.strip() == "torchddp.ddp.module", name
        assert same(parameters, expected), name
        assert done.stderr.count("makes torchddp's class in this process") == 1, done.stderr  # once, by one rank
