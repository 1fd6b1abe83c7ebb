"""The parts of torchddp.averaging that need no ranks: fragments, parameter names, memory layouts, flat buckets."""

import pytest
import torch

from tests.averaging import make_net
from torchddp.averaging.diloco import fragment_starts, plan_fragments
from torchddp.averaging.flat import FlatBucket, memory_of, named_parameters, plan_buckets, problem_of, wire_of


def test_fragments_take_every_nth_layer():
    names = ["wte.weight", "h.0.a.weight", "h.0.b.bias", "h.1.a.weight", "h.1.b.bias", "h.2.a.weight", "ln.weight"]
    assert plan_fragments(names, 2) == [
        ["wte.weight", "h.1.a.weight", "h.1.b.bias", "ln.weight"],
        ["h.0.a.weight", "h.0.b.bias", "h.2.a.weight"],
    ]
    assert plan_fragments(names, 1) == [names]
    # With fewer layers than fragments, parameters are split.
    assert plan_fragments(["h.0.a", "h.0.b", "h.0.c"], 2) == [["h.0.a", "h.0.c"], ["h.0.b"]]
    assert plan_fragments(["params[0]", "params[1]"], 2) == [["params[0]"], ["params[1]"]]
    for fragments in (0, 8):
        with pytest.raises(ValueError, match=f"at most 7, the number of parameters, got {fragments}"):
            plan_fragments(names, fragments)


@pytest.mark.parametrize("fragments", [1, 3, 4, 10])
def test_fragment_starts_are_spread_evenly(fragments):
    starts = fragment_starts(10, fragments)
    assert starts[-1] == 10 and len(set(starts)) == fragments
    gaps = [b - a for a, b in zip([0, *starts], starts, strict=False)]
    assert min(gaps) >= 10 // fragments and max(gaps) <= -(-10 // fragments)


def test_parameters_are_named_by_module_optimizer_or_index():
    net = make_net()
    assert "frozen" not in named_parameters(net) and "embed.weight" in named_parameters(net)
    params = [p for p in net.parameters() if p.requires_grad]
    assert list(named_parameters([params[0], params[1], params[0]])) == ["params[0]", "params[1]"]
    groups = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:4]}], lr=0.1).param_groups
    assert list(named_parameters(groups)) == [f"params[{i}]" for i in range(4)]
    with_names = torch.optim.SGD(list(net.named_parameters()), lr=0.1).param_groups
    assert named_parameters(with_names).keys() == named_parameters(net).keys()


def test_dense_tensors_are_viewed_flat_and_others_reported():
    strided = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    flat = memory_of(strided)
    assert flat.shape == (24,) and flat.data_ptr() == strided.data_ptr()
    assert torch.equal(flat.view(2, 2, 2, 3).permute(0, 3, 1, 2), strided)
    assert memory_of(torch.tensor([1 + 2j, 3 + 4j])).tolist() == [1, 2, 3, 4]
    assert problem_of({"w": strided}) is None
    for bad in (strided[:, :2], torch.ones(1, 3).expand(4, 3)):
        assert "leaves gaps" in str(problem_of({"w": bad}))
    assert problem_of({"w": torch.ones(4, 1, 3)[:, :, :]}) is None
    other = torch.ones(2, device="meta")
    assert "'w' is on meta, 'v' on cpu" in str(problem_of({"v": torch.ones(2), "w": other}))


def test_flat_buckets_have_one_dtype_a_size_limit_and_their_tensors_strides():
    sizes = [300, 200, 700, 10, 10]
    named = {f"p{i}": torch.full((n,), float(i)) for i, n in enumerate(sizes)}
    named["low"] = torch.ones(8, dtype=torch.bfloat16)
    buckets = plan_buckets(named, 2000 / 2**20)
    assert sorted(name for bucket in buckets for name in bucket.named) == sorted(named)
    for bucket in buckets:
        assert len({t.dtype for t in bucket.named.values()}) == 1
        assert len(bucket.named) == 1 or sum(t.nbytes for t in bucket.named.values()) <= 2000
        flat = torch.zeros(bucket.numel, dtype=bucket.sum_dtype)
        bucket.pack(flat)
        assert flat.dtype == torch.float32
        bucket.unpack(flat + 1)
    assert all(torch.equal(named[f"p{i}"], torch.full((n,), i + 1.0)) for i, n in enumerate(sizes))
    assert len([b for b in buckets if "p2" in b.named][0].named) == 1
    strided = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    bucket = FlatBucket.of({"a": torch.ones(5), "b": strided})
    whole = torch.zeros(50)
    flat = whole[7 : 7 + bucket.numel]
    bucket.pack(flat)
    assert torch.equal(bucket.views(flat)[1], strided) and bucket.views(flat)[1].stride() == strided.stride()
    low = FlatBucket.of({"a": torch.ones(5, dtype=torch.bfloat16)})
    plain = FlatBucket.of({"a": torch.ones(5)})
    assert (wire_of(None, low), wire_of("fp32", low), wire_of(None, plain)) == ("bf16", "fp32", "fp32")
