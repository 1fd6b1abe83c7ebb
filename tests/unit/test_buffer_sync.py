"""A model's buffers: the compiled walk against torch's, which can be sent as bytes, and the arguments for torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchddp import _C
from torchddp.ddp import model as ddp_model
from torchddp.ddp import options
from torchddp.ddp.module import options_of

# A module of the tree: its parent, its buffers, and another module that is also its child.
Node = tuple[int, list[int], int]
NODES = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 20)), max_size=12
)


def _tree(nodes: list[Node]) -> nn.Module:
    # Buffer 0 is None; the other buffers and the modules may be shared, and modules may form cycles.
    buffers = [None, *(torch.full((2,), float(index)) for index in range(5))]
    modules = [nn.Module()]
    for parent, indices, extra in nodes:
        module = nn.Module()
        for place, index in enumerate(indices):
            module.register_buffer(f"b{place}", buffers[index])
        modules[parent % len(modules)].add_module(f"m{len(modules)}", module)
        modules.append(module)
        module.add_module("extra", modules[extra % len(modules)] if extra % 3 else None)
    return modules[0]


@given(NODES)
def test_buffers_are_found_in_torchs_order(nodes: list[Node]) -> None:
    module = _tree(nodes)
    assert [id(buffer) for buffer in ddp_model.buffers_of(module)] == [id(buffer) for buffer in module.buffers()]


def test_replaced_and_scripted_buffers_are_found() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    first = ddp_model.buffers_of(module)
    module[0].running_mean = torch.ones(3)
    module[0]._buffers["running_var"] = torch.ones(3)
    second = ddp_model.buffers_of(module)
    assert [a is b for a, b in zip(first, second, strict=True)] == [False, False, True]
    assert second[0] is module[0].running_mean and second[1] is module[0].running_var
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    found = ddp_model.buffers_of(module)
    assert [buffer.data_ptr() for buffer in found] == [buffer.data_ptr() for buffer in module.buffers()]
    assert len(found) == 3


class _Odd(torch.Tensor):
    pass


def test_only_dense_cpu_tensors_can_be_sent_as_bytes() -> None:
    dense = torch.zeros(3)
    good = [dense, nn.Parameter(dense), dense.double(), torch.zeros(2, 3, dtype=torch.int64).t(), torch.zeros(0)]
    assert _C.can_travel_as_bytes(good)
    assert _C.can_travel_as_bytes([])
    for odd in (dense.to_sparse(), dense.to("meta"), dense.as_subclass(_Odd)):
        assert not _C.can_travel_as_bytes([dense, odd]), type(odd)
        assert not _C.can_travel_as_bytes([odd]), type(odd)


@pytest.mark.parametrize(
    ("forward", "both", "said"),
    [(None, None, True), (None, False, False), (None, True, True), (False, None, False), (True, False, True)],
)
def test_torch_without_forward_sync_buffers_gets_broadcast_buffers(monkeypatch, forward, both, said):
    older = options._TORCH_ARGUMENTS - {"forward_sync_buffers"}
    monkeypatch.setattr(options, "_TORCH_ARGUMENTS", older)
    given = options_of(broadcast_buffers=both, forward_sync_buffers=forward).for_torch(may_be_views=True)
    assert given["broadcast_buffers"] == said and "forward_sync_buffers" not in given
