"""`torchddp doctor`: its findings, also where torch or the compiled extension does not load."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.programs import python
from torchddp import _C, _torch
from torchddp._command import is_command
from torchddp.cli import checks
from torchddp.cli.checks import set_variables
from torchddp.cli.doctor import (
    Built,
    Gpu,
    Running,
    _gpus,
    _running_rows,
    has_kernels_for,
    hints,
    over_nccl,
    reason_against_nccl,
)

CUDA_BUILT = Built(torch="2.13.0+cu130", cuda="13.0.88", nccl="2.29.7", archs="75-real 80-real 90-real 100")
CUDA_RUNNING = Running(python="3.11.7", torch="2.13.0+cu130", cuda="13.0", nccl="2.29.7")


def doctor(*args: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `torchddp doctor` in its own process, after the statements `before`."""
    code = f"import sys; sys.argv = ['/somewhere/bin/torchddp', 'doctor', *{args!r}]\n{before}\n"
    code += "from torchddp.cli import main; main()"
    return python("-c", code, **environment)


WITHOUT_THE_EXTRA = "sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib', 'numpy')))"


def test_a_working_installation_passes_and_needs_no_package_besides_torch(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    own = tmp_path / "own.py"
    own.write_text(
        "from torch import nn, ones\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), ones(1, 4)\n"
    )
    variables = {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": str(cores)}
    done = doctor("--json", "--model", f"{own}:make", before=WITHOUT_THE_EXTRA, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    works = {transport["name"]: transport["works"] for transport in found["transports"]}
    assert found["problems"] == [] and works.items() >= {"c10d": True, "shm": True}.items()
    assert found["verdict"] == f"torchddp works here, over {', '.join(name for name in works if works[name])}."
    assert found["date"].startswith("20") and found["date"].endswith("+00:00")
    assert found["built"]["version"] == _C.version and found["built"]["compiler"].startswith(("GNU", "Clang"))
    assert found["running"]["cpu_capability"] == _C.cpu_capability()
    assert found["running"]["threads"] == cores and found["running"]["ranks"] == 2
    balance = found["balance"]
    assert balance["matrices"] == 1 and [share["elements"] for share in balance["shares"]] == [20, 23]
    second = doctor(before=WITHOUT_THE_EXTRA, **variables, LOCAL_RANK="1")
    assert (second.returncode, second.stdout) == (0, "")


def test_a_torch_that_does_not_load_is_reported() -> None:
    done = doctor("--json", before="sys.modules['torch'] = None")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "torch" in found["problems"][0] and found["running"]["torch"] == ""


def test_a_torch_without_an_extension_is_reported(tmp_path: Path) -> None:
    other = "import torch; torch.__version__ = '2.10.0'"
    done = doctor(before=other, LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1", TORCHDDP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "problem: torch 2.10.0" in done.stdout and "Compile one for this torch with `torchddp build`" in done.stdout
    assert f"torchddp        {_C.version}" in done.stdout and "extensions      _C-torch2." in done.stdout
    assert "threads         1 in each of 2 ranks" in done.stdout and "OMP_NUM_THREADS" not in done.stdout
    assert "shm             torchddp does not load" in done.stdout  # no transport is tested
    assert "torchddp will not work here: 1 problem, see above." in done.stdout


def test_without_the_extra_build_works_and_other_commands_say_what_to_install() -> None:
    kind = "cuda" if _C.with_cuda else "cpu"
    done = doctor(before=f"{WITHOUT_THE_EXTRA}; sys.argv[1:] = ['build', '--json', '--kind', '{kind}']")
    assert done.returncode == 0 and json.loads(done.stdout)["file"] == _C.__file__, done.stderr
    done = doctor(before=f"{WITHOUT_THE_EXTRA}; sys.argv[1:] = ['trace']")
    said = "torchddp: all commands but `doctor` and `build` need more packages: pip install typer rich matplotlib"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said


def test_the_command_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, orig_argv, expected in (
        (["/venv/bin/torchddp", "doctor"], ["python", "/venv/bin/torchddp", "doctor"], True),
        (["-m", "doctor"], ["python", "-X", "dev", "-m", "torchddp", "doctor"], True),
        (["-m"], ["python", "-m", "pytest", "torchddp"], False),
        (["train.py", "torchddp"], ["python", "train.py", "torchddp"], False),
        ([], [], False),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", orig_argv)
        assert is_command() is expected, orig_argv


@pytest.mark.parametrize("asked", ["--help", "--version", "trace -h", "bench --help", "doctor -h", "build -h", ""])
def test_help_and_version_do_not_import_torch(asked: str) -> None:
    code = f"""import sys; sys.argv = ["torchddp", *{asked.split()!r}]
try:
    from torchddp.cli import main; main()
finally:
    print("torch" in sys.modules, file=sys.stderr)"""
    done = python("-c", code)
    assert done.returncode == 0 and "orchddp" in done.stdout and done.stderr == "False\n", done.stderr


def test_gpus_that_this_build_does_not_support_are_reported() -> None:
    gpus = [Gpu("NVIDIA H200", "9.0"), Gpu("NVIDIA A10", "8.6"), Gpu("one to come", "12.0")]
    assert hints(CUDA_BUILT, dataclasses.replace(CUDA_RUNNING, gpus=gpus)) == []
    old = dataclasses.replace(CUDA_RUNNING, gpus=[*gpus, Gpu("Tesla V100", "7.0")])
    (hint,) = hints(CUDA_BUILT, old)
    assert "Tesla V100 has compute capability 7.0" in hint
    torch = mock.Mock(**{"cuda.device_count.return_value": 1})
    torch.cuda.get_device_capability.side_effect = RuntimeError("CUDA error: ECC\nThe stack trace may be incorrect.")
    broken = dataclasses.replace(CUDA_RUNNING, gpus=_gpus(torch))
    assert hints(CUDA_BUILT, broken) == [] and ("GPUs", "0: CUDA error: ECC (does not work)") in _running_rows(broken)
    built = Built(version="0.2.0", torch="2.13.0+cpu")
    (hint,) = hints(built, CUDA_RUNNING)
    assert "CPU models are fine" in hint and "`torchddp build` compiles the CUDA variant" in hint
    assert hints(built, dataclasses.replace(CUDA_RUNNING, cuda="")) == []
    assert hints(CUDA_BUILT, CUDA_RUNNING) == []


def test_it_says_what_ranks_of_this_host_do_with_large_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    for has_multicast, words in ((True, "packs all gradients: 8 ranks"), (False, "reduces large gradients")):
        monkeypatch.setattr(_torch, "has_multicast", lambda index, answer=has_multicast: answer)
        assert over_nccl(8).startswith(f"a rank on each GPU {words}")
        assert "not registered with NCCL" in over_nccl(8)
    assert over_nccl(0) == ""


def test_kernels_exist_for_the_architectures_of_the_build() -> None:
    for archs, with_kernels, without in (
        ("80-real 90-real 100", ("8.0", "8.9", "10.3", "12.0"), ("7.5",)),
        ("86-real", (), ("8.0", "9.0")),
        ("80-virtual", ("9.0",), ()),
        ("100-virtual", (), ("9.0",)),
        ("", (), ("9.0",)),
    ):
        found = [gpu for gpu in (*with_kernels, *without) if has_kernels_for(archs, gpu)]
        assert found == list(with_kernels), archs


def test_nccl_needs_a_cuda_build_nccl_and_a_gpu() -> None:
    for built, changes, words in (
        (Built(), {}, "built without CUDA"),
        (CUDA_BUILT, {"nccl": ""}, "has no NCCL"),
        (CUDA_BUILT, {}, "torch sees no GPU (there is no driver)"),
        (CUDA_BUILT, {"driver": "CUDA 12.2"}, "torch sees no GPU (CUDA 12.2)"),
        (CUDA_BUILT, {"gpus": [Gpu("NVIDIA H200", "9.0")]}, ""),
    ):
        reason = reason_against_nccl(built, dataclasses.replace(CUDA_RUNNING, **changes))
        assert words in reason and bool(words) is bool(reason), (built, changes)


@pytest.mark.thorough
def test_a_failing_transport_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "-1")
    assert "TORCHDDP_SHM_LIMIT_MB must be a positive number of MiB" in checks.failure("shm")


def test_a_transport_that_hangs_is_reported() -> None:
    assert "no message from ranks [0, 1] for 0.05 s" in checks.failure("shm", timeout_s=0.05)


def test_invalid_and_unknown_environment_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHDDP_")]:
        monkeypatch.delenv(name)
    assert set_variables() == []
    for name, value in {
        "TORCHDDP_CPU_CAPABILITY": "sse2",
        "TORCHDDP_HOST_ID": "anything",
        "TORCHDDP_SHM_LIMIT_MB": "64",
        "TORCHDDP_STALL_REPORT_S": "soon",
        "TORCHDDP_TRANSPORT": "",
        "TORCHDDP_TRANSPROT": "shm",
    }.items():
        monkeypatch.setenv(name, value)
    judged = {variable.name: variable for variable in set_variables()}
    wrong = {name: variable.problem for name, variable in judged.items() if variable.problem}
    assert list(wrong) == ["TORCHDDP_CPU_CAPABILITY", "TORCHDDP_STALL_REPORT_S"]
    assert "'sse2'" in wrong["TORCHDDP_CPU_CAPABILITY"] and "'soon'" in wrong["TORCHDDP_STALL_REPORT_S"]
    assert [name for name, variable in judged.items() if variable.note] == ["TORCHDDP_TRANSPROT"]


def test_it_shows_what_each_rank_would_own() -> None:
    done = doctor("--model", "mlp", "--world-size", "5", before=WITHOUT_THE_EXTRA)
    assert done.returncode == 0 and "torchddp works here, over c10d, shm" in done.stdout, done.stdout + done.stderr
    assert "Muon on 5 matrices and AdamW on the rest, 5 ranks" in done.stdout
    assert all(f"rank {rank}          20.0% of the cost, " in done.stdout for rank in range(5))
    assert "largest         1.00 times the mean cost" in done.stdout
    done = doctor("--model", "nope", before=WITHOUT_THE_EXTRA)
    assert done.returncode == 2 and "There is no model 'nope'; choose from small" in done.stderr
    done = doctor("--model", "mlp", "--world-size", "4097", before=WITHOUT_THE_EXTRA)
    assert done.returncode == 2 and "error: --world-size must be 1 to 4096, not 4097.\n" in done.stderr
