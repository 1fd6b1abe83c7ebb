"""torchddp.install() and uninstall(): effects, messages and errors. Training: tests/distributed/test_install.py."""

import importlib
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each
from tests.programs import ROOT, python
from torchddp import Checks, run
from torchddp.harness.launch import RankJob, launch
from torchddp.integrations import composer, require
from torchddp.integrations import install as install_module

PLAIN = type(TorchDDP)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    torchddp.uninstall()


def test_uninstall_restores_torchs_class_exactly() -> None:
    before = dict(vars(TorchDDP))
    names = dict(vars(torch.nn.parallel))
    torchddp.uninstall()
    for _ in range(2):
        torchddp.install()
        assert torchddp.installed() and type(TorchDDP) is not PLAIN
    torchddp.uninstall()
    assert not torchddp.installed() and type(TorchDDP) is PLAIN
    assert dict(vars(TorchDDP)) == before and dict(vars(torch.nn.parallel)) == names


def test_leaving_the_with_block_restores_the_previous_state() -> None:
    with torchddp.install(transport="shm"):
        with torchddp.install(checks=Checks(nonfinite=True)):
            assert install_module._defaults == {"transport": "shm", "checks": Checks(nonfinite=True)}
        assert install_module._defaults == {"transport": "shm"}
        with torchddp.uninstall():
            assert not torchddp.installed() and type(TorchDDP) is PLAIN
        assert install_module._defaults == {"transport": "shm"} and type(TorchDDP) is not PLAIN
    assert not torchddp.installed() and type(TorchDDP) is PLAIN
    with pytest.raises(KeyError), torchddp.install(), torchddp.install():
        raise KeyError("inside")
    assert type(TorchDDP) is PLAIN
    with pytest.raises(ValueError, match="process group"), torchddp.install():
        TorchDDP(torch.nn.Linear(1, 1))  # torch's own error: there is no group
    assert type(TorchDDP) is PLAIN


def test_wrong_defaults_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="argument 'transprot'. Did you mean 'transport'"):
        torchddp.install(transprot="shm")
    with pytest.raises(TypeError, match="unexpected keyword argument 'module'"):
        torchddp.install(module=None)
    assert not torchddp.installed()


def test_install_keeps_the_class_and_changes_its_signature() -> None:
    own = list(inspect.signature(TorchDDP).parameters)
    with torchddp.install():
        names = list(inspect.signature(TorchDDP).parameters)
        assert issubclass(torchddp.DDP, TorchDDP) and not issubclass(torch.nn.Linear, TorchDDP)
        assert isinstance(object.__new__(TorchDDP), TorchDDP) and isinstance(object.__new__(torchddp.DDP), TorchDDP)
        assert pickle.loads(pickle.dumps(TorchDDP)) is TorchDDP
        assert torch.nn.parallel.DistributedDataParallel is TorchDDP
        assert TorchDDP._get_active_ddp_module() is None

    assert names == list(inspect.signature(torchddp.DDP).parameters)
    assert names[: len(own)] == own and "transport" in names
    assert list(inspect.signature(TorchDDP).parameters) == own


class OwnMeta(PLAIN):  # type: ignore[misc, valid-type]
    pass


def test_classes_derived_after_install_use_ours_and_earlier_ones_are_restored() -> None:
    class Before(TorchDDP):
        pass

    class Special(TorchDDP, metaclass=OwnMeta):
        pass

    with torchddp.install():
        assert type(Before) is type(TorchDDP) is not PLAIN and type(Special) is OwnMeta

        class Meanwhile(TorchDDP):
            """Its own docstring."""

            answer = 42

        class OfBefore(Before):
            pass

        class OfOurs(torchddp.DDP):
            pass

    assert issubclass(Meanwhile, torchddp.DDP) and type(Meanwhile) is PLAIN
    assert (Meanwhile.__doc__, Meanwhile.answer, Meanwhile.__module__) == ("Its own docstring.", 42, __name__)
    assert not issubclass(OfBefore, torchddp.DDP) and issubclass(OfOurs, torchddp.DDP)
    assert type(Before) is type(OfBefore) is PLAIN and type(Special) is OwnMeta


def ray(mode: int | None) -> SimpleNamespace:
    context = SimpleNamespace(worker=SimpleNamespace(mode=mode))
    calls = {"is_initialized": lambda: mode is not None, "get_runtime_context": lambda: context}
    return SimpleNamespace(SCRIPT_MODE=0, WORKER_MODE=1, **calls)


def spark(context: Any, task: Any) -> SimpleNamespace:
    task_context = SimpleNamespace(get=lambda: task)
    return SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=context), TaskContext=task_context)


def test_a_driver_is_warned_that_its_workers_are_other_processes(monkeypatch, caplog):
    for engine, module, changes, at_once, in_all in (
        ("Ray", {"ray": ray(0)}, {}, 1, 1),
        ("Ray", {"ray": ray(1)}, {}, 0, 0),  # a worker
        ("Ray", {"ray": ray(None)}, {}, 0, 1),  # started afterwards
        ("Ray", {"ray": ray(None)}, {"_models": 1}, 0, 0),
        ("Ray", {"ray": ray(0)}, {"os": SimpleNamespace(environ={"RANK": "0", "WORLD_SIZE": "1"})}, 0, 0),
        ("Spark", {"pyspark": spark(object(), None)}, {}, 1, 1),
        ("Spark", {"pyspark": spark(None, object())}, {}, 0, 0),
    ):
        ends: list[Callable[[], None]] = []
        at_exit = SimpleNamespace(register=ends.append, unregister=lambda call, ends=ends: ends.clear())
        known = {"_warned": False, "atexit": at_exit, "os": SimpleNamespace(environ={}), **changes}
        line = f"only affects this process, not {engine}'s workers: call it in the function that {engine} runs"
        caplog.clear()
        with mock.patch.dict(sys.modules, module), mock.patch.multiple(install_module, **known):
            torchddp.install()
            torchddp.install()
            assert caplog.text.count(line) == at_once, (engine, changes)
            assert len(ends) <= 1, (engine, changes)
            for call in ends:
                call()
        assert caplog.text.count(line) == in_all, (engine, changes)


def test_a_missing_integration_is_reported_with_the_package_to_install(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"^no_such_client is not installed: pip install mosaicml$"):
        require("no_such_client.trainer", "mosaicml")
    assert require("json.decoder", "mosaicml").__name__ == "json.decoder"
    (tmp_path / "some_client.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        require("some_client", "composer")
    cases = (
        ("lightning", lambda: importlib.import_module("torchddp.integrations.lightning"), "lightning"),
        ("composer", lambda: composer.enable(), "mosaicml"),
        ("accelerate", lambda: importlib.import_module("torchddp.integrations.accelerate"), "accelerate"),
    )
    for client, use, package in each(cases):
        pattern = rf"(torchddp\.integrations\.(lightning|accelerate)|{client})(\.|$)"
        for name in [name for name in sys.modules if re.match(pattern, name)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, client, None)
        with pytest.raises(ImportError, match=rf"^{client}[.\w]* is not installed: pip install {package}$"):
            use()


def test_torchddp_install_must_be_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")  # this restores it
    for wrong in ("yes", "2", " 1"):
        monkeypatch.setenv("TORCHDDP_INSTALL", wrong)
        with pytest.raises(ValueError, match=f"TORCHDDP_INSTALL must be 1 .* got '{wrong}'"):
            install_module.install_by_variable()
    for given in ("", "0", "1"):
        monkeypatch.setenv("TORCHDDP_INSTALL", given)
        install_module.install_by_variable()
        assert torchddp.installed() == (given == "1"), given


@pytest.mark.thorough
def test_the_torchddp_command_ignores_torchddp_install() -> None:
    code = "import sys; sys.argv = ['/bin/torchddp', 'doctor']; import torchddp; print(torchddp.installed())"
    done = python("-c", code, TORCHDDP_INSTALL="1")
    assert done.stdout == "False\n", done.stdout + done.stderr


def _is_installed(report: object) -> bool:
    return torchddp.installed()


def test_so_do_the_ranks_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDDP_INSTALL", "1")
    assert not launch(RankJob("test", _is_installed, (), 1), print)


REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description, override, **arguments):
        self[name] = strategy
StrategyRegistry = Registry()
"""


def test_an_unsupported_lightning_does_not_break_the_import(tmp_path: Path) -> None:
    for name, strategies in (("fabric", ""), ("pytorch", REGISTRY)):
        package = tmp_path / "lightning" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "strategies.py").write_text(strategies)
    (tmp_path / "lightning" / "__init__.py").touch()
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "TORCHDDP_INSTALL": "1"}
    done = python("-c", "import lightning.pytorch, torchddp; print(torchddp.installed())", **variables)
    assert done.stdout == "True\n", done.stdout + done.stderr
    assert "Can't register torchddp's strategies with Lightning" in done.stderr


SCRIPT = """
import os, pickle, sys
import beside
def function(): pass
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], __name__, __file__, __package__, main.function is function, __doc__)
print(pickle.loads(pickle.dumps(function)) is function, "__spec__" in globals(), "__loader__" in globals())
if "--fail" in sys.argv:
    raise KeyError("the script's own")
if "--installed" in sys.argv:
    from torch.nn.parallel import DistributedDataParallel as D
    print(type(D).__name__, os.environ["TORCHDDP_INSTALL"])
"""


def test_a_program_runs_as_under_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "__init__.py").touch()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "module.py").write_text(SCRIPT.replace("import beside", "from . import beside"))
    monkeypatch.chdir(tmp_path)
    line = SCRIPT.splitlines().index('    raise KeyError("the script\'s own")') + 1
    ways = {"script": ["package/script.py", "--lr", "-m", "--help"], "module": ["-m", "package.module"]}
    for name, arguments in ways.items():
        plain, ours = python(*arguments, "--fail"), python("-m", "torchddp.run", *arguments, "--fail")
        assert ours.stdout == plain.stdout != "" and ours.returncode == plain.returncode == 1, name
        assert f'{folder}/{name}.py", line {line}, in <module>' in ours.stderr
        assert ours.stderr.endswith('KeyError: "the script\'s own"\n')
    done = python("-m", "torchddp.run", "package/script.py", "--installed")
    assert done.stdout.endswith("_InstalledMeta 1\n")


STARTS_RANKS = """
import multiprocessing, subprocess, sys
SAYS = "import torch; from torch.nn.parallel import DistributedDataParallel as D; print(type(D).__name__)"
def rank():
    exec(SAYS)
if __name__ == "__main__":
    if "import" in sys.argv:
        import torchddp
    process = multiprocessing.get_context("spawn").Process(target=rank)
    process.start()
    process.join()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', " + repr(SAYS) + "])"
    subprocess.run([sys.executable, "-c", code])  # a grandchild
    plain = "import sys, sitecustomize; print(sitecustomize.mine, [name for name in sys.modules if 'torch' in name])"
    subprocess.run([sys.executable, "-c", plain])
"""


@pytest.mark.rest_is_thorough("run")
@pytest.mark.parametrize("by", ["run", "variable"])
def test_processes_that_a_program_starts_itself_are_reached(by: str, tmp_path: Path) -> None:
    """A module sitecustomize of the user still runs, and processes without torch stay without it."""
    (tmp_path / "script.py").write_text(STARTS_RANKS)
    (tmp_path / "sitecustomize.py").write_text("mine = 'my own'\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    script = str(tmp_path / "script.py")
    arguments, more = ["-m", "torchddp.run", script], {}
    if by == "variable":
        arguments, more = [script, "import"], {"TORCHDDP_INSTALL": "1"}
    done = python(*arguments, PYTHONPATH=paths, **more)
    said = ["_InstalledMeta", "_InstalledMeta", "my own []"]
    assert done.stdout.splitlines() == said and not done.stderr, done.stdout + done.stderr


def test_processes_without_torchddp_do_not_notice(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "torchddp.py").write_text("raise ModuleNotFoundError('no such module', name='torchddp')")
    folder = Path(install_module.__file__).parent / "in_children"
    for paths in ([folder, tmp_path], [folder]):  # with torch, and without
        done = python(
            *("-c", "import sys, sitecustomize\ntry: import torch\nexcept ImportError: pass\nprint(sys.meta_path[-1])"),
            PYTHONPATH=os.pathsep.join(map(str, paths)), TORCHDDP_INSTALL="1", cwd=tmp_path,
        )  # fmt: skip
        assert "PathFinder" in done.stdout and not done.stderr, done.stdout + done.stderr


def test_wrong_arguments_of_torchddp_run_are_reported(capsys, monkeypatch):
    for name in ("TORCHDDP_INSTALL", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # main sets it; this restores it
    for arguments, code, words in (
        ([], 2, "which program?"),
        (["--fast", "script.py"], 2, "unknown option --fast"),
        (["-m"], 2, "which program?"),
        (["nowhere.py"], 2, "can't open file"),
    ):
        with pytest.raises(SystemExit) as ended:
            run.main(arguments)
        assert ended.value.code == code and words in capsys.readouterr().err, arguments
    done = python("-m", "torchddp.run", "-m", "no_such_module_anywhere")
    assert done.returncode == 1 and "No module named no_such_module_anywhere" in done.stderr
