"""Mixed precision by torch: autocast, and GradScaler, whose steps are skipped and clipped alike on all ranks."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tests.harness import each, on_ranks
from tests.models import Mlp, batch, grads_of, loss_of, same_on_all_ranks, seeded
from tests.torch_features import assert_same_program

STEPS = 6
float_mlp = partial(Mlp, dtype=torch.float32)


def scaled_program(rank, options=None, clip=None, bad_rank=None, bad_steps=(), dtype=None, accumulate=1):
    """Gradients and the scale after each step; on `bad_rank` the loss of `bad_steps` overflows."""

    def program(cls):
        ddp = cls(seeded(float_mlp), **(options or {}))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(accumulate):
                ddp.require_backward_grad_sync = part == accumulate - 1
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = loss_of(ddp(batch(rank, 10 * step + part, dtype=torch.float32)).float())
                if rank == bad_rank and step in bad_steps:
                    loss = loss * math.inf
                scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), clip, foreach=True)
            before = nn.utils.parameters_to_vector(ddp.parameters()).detach().clone()
            scaler.step(optimizer)
            scaler.update()
            after = nn.utils.parameters_to_vector(ddp.parameters()).detach()
            assert torch.equal(before, after) == (step in bad_steps), f"rank {rank}, step {step}"
            assert same_on_all_ranks([after, torch.tensor(scaler.get_scale())])
            seen.append({"parameters": after.clone(), "scale": torch.tensor(scaler.get_scale())})
            if step not in bad_steps:  # NaN is not equal to itself
                seen[-1] |= grads_of(ddp)
        return seen

    return program


@on_ranks(2)
def test_an_overflow_on_one_rank_is_skipped_on_all(rank, ddp_class):
    """The average of a gradient is infinite on all ranks if it is on one, so each scaler decides the same alone."""
    views, search = {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}
    overflows = {"bad_rank": 1, "bad_steps": (1, 4)}
    cases = [{"options": options, **overflows} for options in ({}, {"static_graph": True}, views, search)]
    cases += [{"clip": clip, "bad_rank": 0, "bad_steps": (2,)} for clip in (0.5, 1e6)]  # unscaled first
    for case in each([*cases, {"clip": 1.0, "dtype": torch.bfloat16, "accumulate": 3}]):
        assert_same_program(ddp_class, scaled_program(rank, **case), reductions=STEPS)


class Inside(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@on_ranks(2)
def test_autocast_around_the_wrapper_and_inside_the_module(ddp_class):
    for kind in each([Mlp, Inside]):

        def program(cls, kind=kind):
            ddp = cls(seeded(partial(kind, dtype=torch.float32)))
            seen = []
            for step in range(3):
                ddp.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=kind is Mlp):
                    output = ddp(batch(dist.get_rank(), step, dtype=torch.float32))
                assert output.dtype == torch.bfloat16
                loss_of(output.float()).backward()
                assert all(p.grad.dtype == torch.float32 for p in ddp.parameters())
                seen.append(grads_of(ddp))
            return seen

        assert_same_program(ddp_class, program, reductions=3)
