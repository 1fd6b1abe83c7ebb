"""What torchddp.optim.OSS refuses, in words that name rank and parameter; and never a hang."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from torchddp.optim import OSS


def weights(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def error_of(make):
    with pytest.raises(Exception) as caught:
        make()
    return type(caught.value).__name__, str(caught.value)


def test_arguments():
    def work(rank):
        return [
            error_of(lambda: OSS(weights(2), torch.nn.Linear)),
            error_of(lambda: OSS(weights(2), "AdamW")),
            error_of(lambda: OSS(weights(2), OSS)),
            error_of(lambda: OSS(weights(2), torch.optim.LBFGS)),
            error_of(lambda: OSS(weights(2), broadcast_buffer_size=0)),
            error_of(lambda: OSS([])),
            error_of(lambda: OSS(weights(2)[0])),
            error_of(lambda: OSS(weights(2), torch.optim.SGD, lr=-1.0)),
            error_of(lambda: OSS(weights(2), torch.optim.SGD, speed=1.0)),
        ]

    expected = [
        ("TypeError", "optim must be a class of torch.optim.Optimizer, got <class 'torch.nn"),
        ("TypeError", "optim must be a class of torch.optim.Optimizer, got 'AdamW'"),
        ("TypeError", "not OSS itself"),
        ("TypeError", "LBFGS looks at all parameters at once"),
        ("ValueError", "broadcast_buffer_size must be -1 or at least 1 element, got 0"),
        ("ValueError", "empty parameter list"),
        ("TypeError", "iterable of Tensors"),
        ("ValueError", "Invalid learning rate"),
        ("TypeError", "speed"),
    ]
    for errors in run_ranks(work, 2):
        for (kind, text), (wanted_kind, words) in zip(errors, expected, strict=True):
            assert kind == wanted_kind and words in text, text


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        OSS(weights(2))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice():
    def work(rank):
        weight, bias = weights(3, 2)
        twice = error_of(lambda: OSS([("weight", weight), ("bias", bias), ("tied", weight)]))
        groups = error_of(lambda: OSS([{"params": [weight]}, {"params": [bias, weight]}]))
        oss = OSS([weight])
        later = error_of(lambda: oss.add_param_group({"params": [bias, bias]}))
        assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == [weight]
        return twice, groups, later

    for twice, groups, later in run_ranks(work, 2):
        assert twice == ("ValueError", "parameter 2 of group 0 ('tied') is given twice")
        assert groups[0] == "ValueError" and "more than one parameter group" in groups[1]
        assert later == ("ValueError", "parameter 1 of group 1 is given twice")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            lambda: weights((2, 3), 5),
            "On rank 1 it is parameter 1 of group 0: float32[5] on cpu device 0, trainable, on rank 0 parameter 1 of "
            "group 0: float32[4] on cpu device 0, trainable.",
        ),
        (lambda: weights((2, 3), 4, dtype=torch.float64), "it is parameter 0 of group 0: float64[2, 3]"),
        (lambda: weights((2, 3)), "Rank 1 has 1 parameters, rank 0 2: the first that only rank 0 has is parameter 1"),
        (lambda: weights((2, 3), 4, 1), "the first that only rank 1 has is parameter 2 of group 0: float32[1]"),
        (lambda: [p.requires_grad_(p.dim() > 1) for p in weights((2, 3), 4)], "float32[4] on cpu device 0, frozen"),
        (lambda: [{"params": [p]} for p in weights((2, 3), 4)], "it is parameter 0 of group 1: float32[4]"),
    ],
)
def test_ranks_that_differ(odd, words):
    def work(rank):
        return error_of(lambda: OSS(odd() if rank == 1 else weights((2, 3), 4)))

    for kind, text in run_ranks(work, 3):
        assert kind == "RuntimeError" and words in text, text


def test_an_error_on_one_rank_reaches_all():
    class Picky(torch.optim.SGD):
        """Refuses matrices."""

        def __init__(self, params, **options):
            super().__init__(params, **options)
            if any(param.dim() == 2 for group in self.param_groups for param in group["params"]):
                raise ValueError("no matrices")

    def work(rank):
        first = error_of(lambda: OSS(weights((9, 9), 4), Picky, lr=1.0))
        oss = OSS(weights(9, 4), Picky, lr=1.0)
        later = error_of(lambda: oss.add_param_group({"params": weights((2, 2))}))
        assert len(oss.param_groups) == 1
        frozen = weights(9, (2, 2))
        oss = OSS([frozen[0], frozen[1].requires_grad_(False)], Picky, lr=1.0)
        frozen[1].requires_grad_(True)
        thawed = error_of(oss.refresh_trainable)
        assert list(oss.param_to_rank) == frozen[:1]
        return first, later, thawed

    owner = ("ValueError", "no matrices")
    other = "OSS failed on other ranks: rank {}: ValueError: no matrices"
    assert run_ranks(work, 2) == [
        (owner, *[("RuntimeError", other.format(1))] * 2),
        (("RuntimeError", other.format(0)), owner, owner),
    ]


def test_ranks_that_thaw_or_add_different_parameters():
    def work(rank):
        params = weights(3, 2)
        params[1].requires_grad_(False)
        oss = OSS(params)
        params[1].requires_grad_(rank == 1)
        thawed = error_of(oss.refresh_trainable)
        params[1].requires_grad_(False)
        added = error_of(lambda: oss.add_param_group({"params": weights(7 + rank)}))
        assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == params[:1]
        oss.refresh_trainable()
        return thawed, added

    for thawed, added in run_ranks(work, 2):
        assert thawed[0] == "RuntimeError" and "On rank 1 it is parameter 1 of group 0" in thawed[1]
        assert added[0] == "RuntimeError" and "parameter 0 of group 1: float32[8]" in added[1]


def test_sparse_gradients():
    def work(rank):
        named = [("dense", weights(3)[0]), ("embedding", weights((4, 2))[0])]
        oss = OSS(named, torch.optim.SGD, lr=1.0)
        named[0][1].grad = torch.ones(3)
        named[1][1].grad = torch.ones(4, 2).to_sparse()
        errors = [error_of(oss.step), error_of(lambda: oss.clip_grad_norm(1.0))]
        assert torch.equal(named[0][1], torch.ones(3))
        dist.barrier()
        return errors

    text = "OSS takes no sparse gradients, and that of parameter 1 of group 0 ('embedding') is sparse"
    assert run_ranks(work, 2) == [[("RuntimeError", text)] * 2] * 2
