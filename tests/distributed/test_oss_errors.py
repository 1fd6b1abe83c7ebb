"""What torchddp.optim.OSS refuses, in words that name rank and parameter; and never a hang."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import assert_each_raises, on_ranks
from tests.oss import weights
from torchddp.optim import OSS


@on_ranks(2)
def test_arguments(rank):
    assert_each_raises(
        (lambda: OSS(weights(2), torch.nn.Linear), TypeError, "optim must be a class of torch.optim.Optimizer, got <"),
        (lambda: OSS(weights(2), "AdamW"), TypeError, "optim must be a class of torch.optim.Optimizer, got 'AdamW'"),
        (lambda: OSS(weights(2), OSS), TypeError, "not OSS itself"),
        (lambda: OSS(weights(2), torch.optim.LBFGS), TypeError, "LBFGS looks at all parameters at once"),
        (lambda: OSS(weights(2), broadcast_buffer_size=0), ValueError, "must be -1 or at least 1 element, got 0"),
        (lambda: OSS([]), ValueError, "empty parameter list"),
        (lambda: OSS(weights(2)[0]), TypeError, "iterable of Tensors"),
        (lambda: OSS(weights(2), torch.optim.SGD, lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda: OSS(weights(2), torch.optim.SGD, speed=1.0), TypeError, "speed"),
    )


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        OSS(weights(2))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks(2)
def test_a_parameter_given_twice(rank):
    weight, bias = weights(3, 2)
    oss = OSS([weight])
    named, groups = [("weight", weight), ("bias", bias), ("tied", weight)], [{"params": [weight]}]
    assert_each_raises(
        (lambda: OSS(named), ValueError, "parameter 2 of group 0 ('tied') is given twice"),
        (lambda: OSS([*groups, {"params": [bias, weight]}]), ValueError, "more than one parameter group"),
        (lambda: oss.add_param_group({"params": [bias] * 2}), ValueError, "parameter 1 of group 1 is given twice"),
    )
    assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == [weight]


@on_ranks(3)
def test_ranks_that_differ(rank):
    def frozen():
        return [p.requires_grad_(p.dim() > 1) for p in weights((2, 3), 4)]

    for odd, words in (
        (
            weights((2, 3), 5),
            "On rank 1 it is parameter 1 of group 0: float32[5] on cpu device 0, trainable, on rank 0 parameter 1 of "
            "group 0: float32[4] on cpu device 0, trainable.",
        ),
        (weights((2, 3), 4, dtype=torch.float64), "it is parameter 0 of group 0: float64[2, 3]"),
        (weights((2, 3)), "Rank 1 has 1 parameters, rank 0 2: the first that only rank 0 has is parameter 1"),
        (weights((2, 3), 4, 1), "the first that only rank 1 has is parameter 2 of group 0: float32[1]"),
        (frozen(), "float32[4] on cpu device 0, frozen"),
        ([{"params": [p]} for p in weights((2, 3), 4)], "it is parameter 0 of group 1: float32[4]"),
    ):
        own = odd if rank == 1 else weights((2, 3), 4)
        assert_each_raises((lambda own=own: OSS(own), RuntimeError, words))


@on_ranks(2)
def test_an_error_on_one_rank_reaches_all(rank):
    class Picky(torch.optim.SGD):
        """Refuses matrices."""

        def __init__(self, params, **options):
            super().__init__(params, **options)
            if any(param.dim() == 2 for group in self.param_groups for param in group["params"]):
                raise ValueError("no matrices")

    def told(owner):
        if rank == owner:
            return ValueError, "no matrices"
        return RuntimeError, f"OSS failed on other ranks: rank {owner}: ValueError: no matrices"

    oss = OSS(weights(9, 4), Picky, lr=1.0)
    frozen = weights(9, (2, 2))
    thawing = OSS([frozen[0], frozen[1].requires_grad_(False)], Picky, lr=1.0)
    frozen[1].requires_grad_(True)
    assert_each_raises(
        (lambda: OSS(weights((9, 9), 4), Picky, lr=1.0), *told(0)),
        (lambda: oss.add_param_group({"params": weights((2, 2))}), *told(1)),
        (thawing.refresh_trainable, *told(1)),
    )
    assert len(oss.param_groups) == 1 and list(thawing.param_to_rank) == frozen[:1]


@on_ranks(2)
def test_ranks_that_thaw_or_add_different_parameters(rank):
    params = weights(3, 2)
    params[1].requires_grad_(False)
    oss = OSS(params)
    params[1].requires_grad_(rank == 1)
    assert_each_raises((oss.refresh_trainable, RuntimeError, "On rank 1 it is parameter 1 of group 0"))
    params[1].requires_grad_(False)
    more = {"params": weights(7 + rank)}
    assert_each_raises((lambda: oss.add_param_group(more), RuntimeError, "parameter 0 of group 1: float32[8]"))
    assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == params[:1]
    oss.refresh_trainable()


@on_ranks(2)
def test_sparse_gradients(rank):
    named = [("dense", weights(3)[0]), ("embedding", weights((4, 2))[0])]
    oss = OSS(named, torch.optim.SGD, lr=1.0)
    named[0][1].grad = torch.ones(3)
    named[1][1].grad = torch.ones(4, 2).to_sparse()
    text = "OSS takes no sparse gradients, and that of parameter 1 of group 0 ('embedding') is sparse"
    assert_each_raises((oss.step, RuntimeError, text), (lambda: oss.clip_grad_norm(1.0), RuntimeError, text))
    assert torch.equal(named[0][1], torch.ones(3))
    dist.barrier()
