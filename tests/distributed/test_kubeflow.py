"""The manifests of examples/kubeflow without a cluster: their content, and that their command trains with the
operators' variables. Each pod is a torchrun on this host; ranks of different pods don't share memory."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import CLAIM, TORCHRUN, UNMODIFIED, clean_environment, free_port, run_together, unmodified_says

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubeflow"


@dataclass(frozen=True)
class Pods:
    """The pods that an operator makes from a manifest: their number and content."""

    count: int
    ranks_each: int
    spec: dict[str, Any]
    container: dict[str, Any]
    operators_variables: dict[str, str]  # without those that differ between pods

    def variables_of(self, pod: int) -> dict[str, str]:
        own = {entry["name"]: entry["value"] for entry in self.container["env"]}
        return {**own, **self.operators_variables, "PET_NODE_RANK": str(pod)}


def pytorchjob(port: int) -> Pods:
    (job,) = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    spec = worker["template"]["spec"]
    (container,) = spec["containers"]
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    (ranks,) = [word.partition("=")[2] for word in container["command"] if word.startswith("--nproc-per-node=")]
    variables = {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PYTHONUNBUFFERED": "1",
    }
    return Pods(worker["replicas"], int(ranks), spec, container, variables)


def trainjob(port: int) -> Pods:
    runtime, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    spec = replicated["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    trainer = job["spec"]["trainer"]
    assert container["name"] == replicated["name"] == "node"
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    own = {"command": trainer["command"], "env": trainer["env"], "resources": trainer["resourcesPerNode"]}
    return Pods(trainer["numNodes"], trainer["numProcPerNode"], spec, {**container, **own}, variables)


@pytest.fixture(params=[pytorchjob, trainjob], ids=["PyTorchJob", "TrainJob"])
def pods(request):
    return request.param(free_port())


@pytest.mark.slow
def test_the_command_trains_with_what_the_operator_sets(pods, tmp_path):
    (tmp_path / "train.py").write_text(UNMODIFIED)
    program, *arguments = pods.container["command"]
    assert program == "torchrun"
    (tmp_path / "reports").mkdir()
    here = {
        "TORCHDDP_HANG_REPORT_DIR": str(tmp_path / "reports"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    # Pods have different network namespaces and so, like hosts, different identities.
    environments = [
        clean_environment(**{**pods.variables_of(pod), **here, "TORCHDDP_HOST_ID": f"pod {pod}"})
        for pod in range(pods.count)
    ]
    done = run_together([[*TORCHRUN, *arguments]] * pods.count, environments, 500, tmp_path)
    output, errors = "".join(pod.stdout for pod in done), "".join(pod.stderr for pod in done)
    assert [pod.returncode for pod in done] == [0] * pods.count, output + errors
    assert sorted(output.splitlines()) == unmodified_says(pods.count * pods.ranks_each, pods.ranks_each)
    assert errors.count(CLAIM) == 1, errors
