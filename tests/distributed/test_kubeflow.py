"""The command of the manifests in examples/kubeflow trains with the operators' variables, without a cluster.

Each pod is a torchrun on this host; ranks of different pods don't share memory.
"""

import os
import sys

import pytest
import yaml

from tests.programs import (
    CLAIM,
    ROOT,
    TORCHRUN,
    UNMODIFIED,
    clean_environment,
    free_port,
    run_together,
    unmodified_says,
)

PODS = 2
RANKS_EACH = 2


def documents(name):
    return yaml.safe_load_all((ROOT / "examples" / "kubeflow" / name).read_text())


def pytorchjob(port):
    """The container of each pod, and the variables that the operator sets in it."""
    (job,) = documents("pytorchjob.yaml")
    policy = job["spec"]["elasticPolicy"]
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return container, {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }


def trainjob(port):
    _, job = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    return trainer, {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }


@pytest.mark.slow
@pytest.mark.rest_is_thorough("pytorchjob")
@pytest.mark.parametrize("manifest", [pytorchjob, trainjob])
def test_the_command_trains_with_what_the_operator_sets(manifest, tmp_path):
    (tmp_path / "train.py").write_text(UNMODIFIED)
    container, variables = manifest(free_port())
    program, *arguments = container["command"]
    assert program == "torchrun"
    variables |= {entry["name"]: entry["value"] for entry in container["env"]}
    variables["TORCHDDP_HANG_REPORT_DIR"] = str(tmp_path)
    variables["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    # Pods have different network namespaces and so, like hosts, different identities.
    environments = [
        clean_environment(**variables, PET_NODE_RANK=str(pod), TORCHDDP_HOST_ID=f"pod {pod}") for pod in range(PODS)
    ]
    done = run_together([[*TORCHRUN, *arguments]] * PODS, environments, 500, tmp_path)
    output, errors = "".join(pod.stdout for pod in done), "".join(pod.stderr for pod in done)
    assert [pod.returncode for pod in done] == [0] * PODS, output + errors
    assert sorted(output.splitlines()) == unmodified_says(PODS * RANKS_EACH, RANKS_EACH)
    assert errors.count(CLAIM) == 1, errors
