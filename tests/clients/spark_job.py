"""A driver of Spark's TorchDistributor: `python -m tests.clients.spark_job WHERE RANKS FOLDER [install]`.

WHERE: "driver" (local_mode: torchrun as a child of the driver) or "tasks" (a torchrun in each task of a barrier stage).
"""

import os
import sys
from typing import Any

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def train(folder: str) -> str:
    """Train with torch's class, then with ours after install(), and compare weights on every rank."""
    import json
    import os
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    import torchddp
    from tests import framework
    from tests.harness import logged
    from tests.models import Mlp, seeded

    said = logged()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    expected = framework.train(TorchDDP(seeded(Mlp)), rank)
    is_ours = torchddp.installed()
    torchddp.install()
    model: Any = framework.wrap(seeded(Mlp))
    before = torchddp.finished_steps()
    weights = framework.train(model, rank)
    found = {
        "rank": rank,
        "installed before": is_ours,
        "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
        "same": all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True)),
        "steps": torchddp.finished_steps() - before,
        "transport": model.reducer.transport.name,
        "said": said,
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return f"done by rank {rank}"


def main(where: str, ranks: int, folder: str, *options: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # for the tasks, which use "python3" by default
    builder = SparkSession.builder.master(f"local[{ranks}]").appName("torchddp")
    spark = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1").getOrCreate()
    if "install" in options:
        import torchddp

        torchddp.install()
    distributor = TorchDistributor(num_processes=ranks, local_mode=where == "driver", use_gpu=False)
    print(distributor.run(train, folder))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
