"""The driver of test_ray.py: Ray Train on two CPU workers, case by case, and the program of docs/launchers.md.

python -m tests.clients.ray_driver FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import torchddp
from tests.clients import ray_training
from tests.pages import code_of

MARK = "TEST_RAY_OF_TORCHDDP"  # in the environment of every process of the run
VARIABLE = {"env_vars": {"TORCHDDP_INSTALL": "1"}}
ONCE_MORE = {"failure_config": FailureConfig(max_failures=1)}
# Arguments of the training function, and of its run.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch": ({}, {}),
    "install": ({"installed": True}, {}),
    "variable": ({"imported": True, "options": {"transport": "c10d"}}, {"worker_runtime_env": VARIABLE}),
    "exit": ({"installed": True, "death": "exit"}, ONCE_MORE),
    "kill": ({"installed": True, "death": "kill"}, ONCE_MORE),
}


def processes() -> list[str]:
    """Commands of the other processes with this run's mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass  # has ended, or belongs to another user
    return found


def fit(folder: Path, case: str, told: dict[str, Any], given: dict[str, Any]) -> None:
    trainer = TorchTrainer(
        ray_training.train,
        train_loop_config={"case": case, "folder": str(folder), **told},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage"), name=case, **given),
    )
    trainer.fit()


def run_page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code_of("launchers.md", "Ray Train"), "launchers.md", "exec"), names)
    return names["result"].metrics


def main(folder: Path) -> None:
    os.chdir(folder)
    ray.init(num_cpus=4, include_dashboard=False)
    for case, (told, given) in CASES.items():
        fit(folder, case, told, given)
    with torchddp.install():
        fit(folder, "elsewhere", {}, {"worker_runtime_env": VARIABLE})
    found = {"page": run_page(), "processes": len(processes())}
    ray.shutdown()
    (folder / "driver.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
