"""Ranks that train on the simulated GPU until one of them is asked to stop: all end after the same step."""

import random

import torch

import torchddp
from tests.simgpu.captured import graph_of
from tests.simgpu.device import NAME, simulated
from tests.simgpu.program import WIDTH, Model, on

LONGEST = 100_000  # steps: a request takes effect within a second


def run(seed: int, rank: int) -> list[str]:
    """How the ranks' ends differ (collective): the number of steps, and the weights. Half of the programs replay."""
    rng = random.Random(seed)
    simulated.start_over(seed, rng.choice((0, 50, 100)))
    asked, at, captures = rng.randrange(torch.distributed.get_world_size()), rng.randrange(2, 30), seed % 2 == 1
    torch.manual_seed(seed)
    stream = torch.Stream(device=NAME)
    with on(stream):
        model = torchddp.DDP(Model((5, 64), (torch.float32,) * 2).to(NAME), transport="simulated")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
        values = torch.full((3, WIDTH), 1.0 + rank).to(NAME)

        def step() -> None:
            optimizer.zero_grad()
            model(values, -1, -1).square().mean().backward()
            optimizer.step()

        run_step, steps = step, 0
        with torchddp.StopTogether(model, signals=()) as stop:
            for steps in range(LONGEST):
                if captures and steps == 2:
                    run_step = graph_of(step)
                run_step()
                simulated.synchronize()  # whose queues would grow
                if steps == at and rank == asked:
                    stop.request("enough")
                if stop:
                    break
        end = torch.cat([torch.tensor([float(steps)]), *(p.detach().cpu().flatten() for p in model.parameters())])
    ends = [torch.empty_like(end) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ends, end)
    found = [] if all(torch.equal(other, end) for other in ends) else [f"ranks end after {[int(e[0]) for e in ends]}"]
    return [*found, *([] if at <= steps < LONGEST - 1 else [f"asked in step {at}, stopped after {steps}"])]
