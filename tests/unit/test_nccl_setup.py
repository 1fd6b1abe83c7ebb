"""Setup of NCCL communicators with a fake NCCL, without a GPU: peers, options, sharing, and the choice of transport."""

import datetime
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import each, on_ranks
from torchddp import _C, _torch
from torchddp.transport import nccl, select
from torchddp.transport.nccl import NcclPeer
from torchddp.transport.nccl_choice import choose, may_use_nvls, may_use_sharp, milliseconds_per_gb

CUDA = torch.device("cuda", 0)
MINUTE = datetime.timedelta(minutes=1)
ALONE = SimpleNamespace(gather=lambda value: [value])  # the exchange of a group of one


def peers(count, **changes):
    """Valid peers, one per rank, with `changes` by rank."""
    sound = {"size": count, "version": 22907, "shares_gpu": False, "shared": ""}
    return [NcclPeer(**{**sound, "device": f"gpu{r}", **changes.get(f"rank{r}", {})}) for r in range(count)]


class Told:
    """An exchange whose results are `others`, one function of this rank's value per round."""

    def __init__(self, *others):
        self._others = list(others)

    def gather(self, value):
        return self._others.pop(0)(value)


def test_ranks_that_cannot_connect_get_the_reason():
    for changes, *words in (
        ({"rank2": {"size": 4}}, "rank 2 counts 4 ranks", "which has 3"),
        ({"rank1": {"version": 22809}}, "rank 0 runs NCCL 2.29.7", "rank 1 2.28.9"),
        ({"rank2": {"device": "gpu0"}}, "ranks 0 and 2 are on the same GPU (gpu0)", "NCCL_MULTI_RANK_GPU_ENABLE=1"),
    ):
        reason = nccl.reason_against(peers(3, **changes))
        assert all(word in reason for word in words), (changes, reason)
    assert nccl.reason_against(peers(1)) == nccl.reason_against(peers(4)) == ""
    # Ranks share a GPU only if NCCL supports it and it is enabled.
    for version, shares, reason in ((23000, True, ""), (22907, True, "same GPU"), (23007, False, "same GPU")):
        one = {"device": "gpu0", "version": version, "shares_gpu": shares}
        found = nccl.reason_against(peers(2, rank0=one, rank1=one))
        assert reason in found and bool(reason) == bool(found), (version, shares)


@pytest.mark.parametrize(
    ("hosts", "nvls", "sharp", "in_place", "words"),
    [
        ([1], True, True, True, "one rank"),
        ([8], False, False, True, "rings and trees"),  # PCIe, or NVLink without multicast
        ([2], True, False, True, "rings and trees"),  # NCCL has no NVLS for two GPUs
        ([3], True, False, True, "3 ranks of one host need 3.7 ms per GB over a ring, 3.3 over NVLS and 0.7 to pack"),
        ([4], True, False, False, "4 ranks of one host need 4.2 ms per GB over a ring, 3.3 over NVLS and 0.7 to pack"),
        ([8], True, False, False, "8 ranks of one host need 4.9 ms per GB over a ring"),
        ([8], False, True, True, "rings and trees"),  # SHARP is in the network
        ([8, 8], True, False, False, "two hosts with NVLS"),
        ([8, 2], True, False, True, "rings and trees"),  # not all hosts have NVLS
        ([8, 8, 8, 8], True, False, True, "rings and trees"),
        ([1, 1, 1], False, True, False, "with SHARP"),
        ([8, 8, 8, 8], True, True, False, "with SHARP"),
    ],
)
def test_large_gradients_are_packed_where_nccl_sums_in_the_switch(hosts, nvls, sharp, in_place, words):
    choice = choose(hosts, nvls=nvls, sharp=sharp)
    assert choice.in_place is in_place and words in choice.reason
    assert f"{choice}".startswith("reduces large gradients in place: " if in_place else "packs all gradients: ")
    assert "not registered with NCCL: " in f"{choice}" and choice.memory
    if len(hosts) == 1 and nvls and hosts[0] > 2:  # by the arithmetic that the reason names
        ring, switch, packing = milliseconds_per_gb(hosts[0])
        assert (ring < switch + packing) is in_place


def test_the_choice_follows_from_what_all_ranks_report():
    one, two = {"host": "a", "nvls": True}, {"host": "b", "nvls": True}
    eight = {f"rank{rank}": one for rank in range(8)}
    assert not nccl.choice_of(peers(8, **eight)).in_place
    assert nccl.choice_of(peers(8, **{**eight, "rank7": {"host": "a", "nvls": False}})).in_place
    assert nccl.choice_of(peers(8, **{**eight, "rank7": {**one, "device": "gpu0"}})).in_place  # two ranks on a GPU
    spread = {f"rank{rank}": one if rank < 4 else two for rank in range(8)}
    assert "two hosts" in nccl.choice_of(peers(8, **spread)).reason
    sharp = {f"rank{rank}": {"host": f"host{rank}", "sharp": True} for rank in range(3)}
    assert not nccl.choice_of(peers(3, **sharp)).in_place
    assert nccl.choice_of(peers(3, **{**sharp, "rank1": {"host": "host1", "sharp": False}})).in_place


def test_variables_of_nccl_count():
    for environment, may in (
        ({}, True),
        ({"NCCL_NVLS_ENABLE": "0"}, False),
        ({"NCCL_NVLS_ENABLE": "1"}, True),
        ({"NCCL_ALGO": "Ring,Tree"}, False),
        ({"NCCL_ALGO": "Ring,NVLS"}, True),
        ({"NCCL_ALGO": "^NVLS"}, False),
        ({"NCCL_ALGO": "^Tree"}, True),
    ):
        assert may_use_nvls(True, environment) is may and not may_use_nvls(False, environment), environment
    assert not may_use_sharp({}, {}) and not may_use_sharp({"collnet_enable": 0}, {"NCCL_COLLNET_ENABLE": "0"})
    assert may_use_sharp({"collnet_enable": 1}, {}) and may_use_sharp({}, {"NCCL_COLLNET_ENABLE": "1"})


class Group:
    """The parts of a process group that the setup uses."""

    bound_device_id = None

    def __init__(self, rank=0, size=2, options=None):
        self._rank, self._size, self._options = rank, size, options

    def _get_backend(self, device):
        if self._options is None:
            raise RuntimeError(f"no backend for {device}")
        return SimpleNamespace(options=self._options)

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def replaced(**functions):
    """Patch the extension's functions as in a CUDA build."""
    sound = {
        "nccl_versions": lambda: (22907, 22907),
        "device_identity": lambda index: f"gpu{index}",
        "make_nccl_id": lambda: b"\x07" * 128,
        "nccl_settings": lambda: ["blocking", "min_ctas", "net_name"],
        "NcclTransport": mock.Mock(name="NcclTransport"),
    }
    return mock.patch.multiple(_C, **{**sound, **functions})


class FakeTransport:
    """A transport over a communicator, which is freed with its last transport."""

    def __init__(self, communicator):
        self.communicator = communicator

    @property
    def shared(self):
        known = weakref.ref(self.communicator)

        def open_another(timeout):
            communicator = known()
            return FakeTransport(communicator) if communicator is not None and communicator.is_sound else None

        return SimpleNamespace(open=open_another)


def factory():
    """Replaces `_C.NcclTransport`."""

    class Communicator:
        is_sound = True

    return mock.Mock(side_effect=lambda *args, **options: FakeTransport(Communicator()))


def connect(group, device=CUDA, exchange=ALONE):
    return nccl.connect(group, device, MINUTE, exchange)


def test_without_an_id_or_with_an_unsupported_option_no_rank_connects():
    made = factory()
    with replaced(NcclTransport=made, make_nccl_id=mock.Mock(side_effect=RuntimeError("no socket"))):
        assert connect(Group(size=1)) == "rank 0: no id from rank 0: no socket"
    with replaced(NcclTransport=made):
        reason = connect(Group(size=1, options=options(max_ctas=8)))
    assert reason.startswith("rank 0: the process group's NCCL options have max_ctas=8, which this torchddp can't set")
    made.assert_not_called()


def test_models_on_one_group_and_device_share_a_sound_communicator():
    made, group, other = factory(), Group(size=1), Group(size=1)
    with replaced(NcclTransport=made):
        first, second = connect(group), connect(group)
        assert first.communicator is second.communicator
        assert made.call_count == 1
        elsewhere = connect(group, torch.device("cuda", 1)), connect(other)
        assert len({id(t.communicator) for t in (first, *elsewhere)}) == made.call_count == 3
        alive = weakref.ref(first.communicator)
        del first, second
        assert alive() is None  # only transports keep it alive
        again = connect(group)
        again.communicator.is_sound = False
        assert connect(group).communicator is not again.communicator
    assert made.call_count == 5


def test_communicators_in_use_end_with_the_program():
    left = []
    shared = SimpleNamespace(leave=lambda: left.append(1))
    made, group = mock.Mock(return_value=SimpleNamespace(shared=shared)), Group(size=1)
    with replaced(NcclTransport=made):
        connect(group)
        connect(group, torch.device("cuda", 1))
    nccl._leave_all()
    assert left == [1, 1]


@pytest.mark.parametrize("theirs", ["", "cd" * 128])
def test_a_communicator_is_shared_only_if_all_ranks_have_it(theirs):
    made, group = factory(), Group(rank=1)

    def exchange(own_id, **changes):
        return Told(
            lambda own: [{**own, "device": "gpu7", **changes}, own],
            lambda own: [[own_id, ""], own],
            lambda own: [{"problem": ""}, own],
        )

    with replaced(NcclTransport=made):
        first = connect(group, exchange=exchange("ab" * 128))
        second = connect(group, exchange=exchange("ef" * 128, shared=theirs))
    assert first.communicator is not second.communicator
    assert [call.args for call in made.call_args_list] == [(b"\xab" * 128,), (b"\xef" * 128,)]  # rank 0's ids
    told = made.call_args.kwargs
    assert (told["rank"], told["size"], told["device_index"], told["timeout"]) == (1, 2, 0, MINUTE)


def options(is_high_priority_stream=False, **fields):
    """Like ProcessGroupNCCL.Options, with NCCL's values for unset fields."""
    unset = {"blocking": -(2**31), "min_ctas": -(2**31), "max_ctas": -(2**31), "net_name": None}
    config = SimpleNamespace(**{**unset, **fields}, unsafe_get_ptr=lambda: 7)
    return SimpleNamespace(config=config, is_high_priority_stream=is_high_priority_stream)


def test_the_process_groups_options_are_passed_to_nccl():
    for given, settings, net_name, high_priority in (
        (None, {}, "", False),
        (options(), {}, "", False),
        (SimpleNamespace(), {}, "", False),  # a group of another backend
        (options(True, min_ctas=4, net_name="IB"), {"min_ctas": 4}, "IB", True),
        (options(blocking=0), {"blocking": 0}, "", False),
    ):
        made = factory()
        with replaced(NcclTransport=made):
            connect(Group(size=1, options=given))
        told = made.call_args.kwargs
        found = (told["settings"], told["net_name"], told["high_priority"])
        assert found == (settings, net_name, high_priority), given
    # torch decides whether a bound group's calls block.
    group = Group(size=1, options=options(blocking=0))
    group.bound_device_id = CUDA
    with replaced():
        assert nccl.options_of(group, CUDA)["settings"] == {}


@pytest.mark.parametrize("nvls", [True, False])
def test_the_choice_reaches_the_transport_and_the_log(nvls, monkeypatch, caplog):
    monkeypatch.setattr("torchddp.transport.store._logged", set())
    caplog.set_level("INFO", "torchddp")
    made = factory()

    def all_alike(own):
        return [{**own, "device": f"gpu{rank}", "size": 4} for rank in range(4)]

    exchange = Told(all_alike, lambda own: [own] * 4, lambda own: [own] * 4)
    with replaced(NcclTransport=made), mock.patch.object(_torch, "has_multicast", lambda index: nvls):
        connect(Group(size=4), exchange=exchange)
    assert made.call_args.kwargs["sums_in_place"] is not nvls
    (line,) = [record.getMessage() for record in caplog.records if "over NCCL" in record.getMessage()]
    assert line.startswith("torchddp over NCCL 2.29.7 packs all" if nvls else "torchddp over NCCL 2.29.7 reduces large")


def test_a_rank_reports_why_it_cannot_use_nccl():
    for bound, functions, words in (
        (None, {"nccl_versions": lambda: None}, "built without CUDA"),
        (None, {"nccl_versions": lambda: (22809, 22907)}, "built with NCCL 2.29.7, but NCCL 2.28.9 is loaded"),
        (None, {"device_identity": mock.Mock(side_effect=RuntimeError("no device"))}, "no device"),
        (torch.device("cuda", 1), {}, "bound to cuda:1, but the model is on cuda:0"),
        (CUDA, {}, ""),
    ):
        group = Group()
        group.bound_device_id = bound
        with replaced(**functions):
            problem = NcclPeer.of_this_rank(group, CUDA, "").problem
        assert words in problem and bool(problem) == bool(words), (bound, functions)


@pytest.mark.skipif(_C.with_cuda, reason="this build has CUDA")
@on_ranks(2)
def test_without_cuda_all_ranks_get_the_same_error():
    assert nccl.connect(dist.group.WORLD, CUDA, MINUTE) == "rank 0, 1: this torchddp was built without CUDA"
    with pytest.raises(RuntimeError, match="transport='nccl' can't be used: rank 0, 1: .*without CUDA"):
        select.open_transport("nccl", dist.group.WORLD, device=CUDA)
    # auto uses the process group without communication.
    assert select.open_transport("auto", dist.group.WORLD, device=CUDA).name == "c10d"


@pytest.fixture
def group_of(monkeypatch):
    """Makes a group with this CUDA backend, in a build with or without CUDA, for `auto` to choose by."""
    monkeypatch.delenv("TORCHDDP_TRANSPORT", raising=False)

    def make(backend, with_cuda):
        group = dist.ProcessGroup(dist.HashStore(), 0, 2)
        monkeypatch.setattr(_C, "with_cuda", with_cuda)
        monkeypatch.setattr(select, "backend_of", lambda *args: SimpleNamespace(name=lambda: backend))
        monkeypatch.setitem(_torch._world.pg_map, group, (backend, None))
        return group

    return make


def test_auto_uses_nccl_only_for_one_gpu_of_an_nccl_group(group_of):
    for backend, with_cuda, devices, collective, expected in (
        ("nccl", True, [CUDA, CUDA], True, "auto"),
        ("nccl2", True, [CUDA], True, "auto"),  # torch 2.15's backend "nccl"
        ("nccl-lazy", True, [CUDA], True, "c10d"),
        ("nccl", False, [CUDA], True, "c10d"),
        ("gloo", True, [CUDA], True, "c10d"),
        ("nccl", True, [CUDA, torch.device("cuda", 1)], True, "c10d"),
        ("nccl", True, [CUDA], False, "c10d"),
        ("nccl", True, [torch.device("xpu")], True, "c10d"),
    ):
        group = group_of(backend, with_cuda)
        found = [select.intended_transport(name, group, devices, collective=collective) for name in ("auto", "c10d")]
        assert found == [expected, "c10d"], (backend, with_cuda, devices, collective)


def test_on_a_torch_that_no_gpu_has_tested_auto_says_once_what_it_chose(group_of, monkeypatch, caplog):
    monkeypatch.setattr("torchddp.transport.store._logged", set())
    caplog.set_level("INFO", "torchddp")
    for version, backend in (("2.11.0+cu130", "nccl"), ("2.15.0", "nccl2"), ("2.15.0", "nccl2"), ("2.16.1", "other")):
        monkeypatch.setattr(torch, "__version__", version)
        group = group_of(backend, with_cuda=True)
        for choice, devices in (("auto", [CUDA]), ("c10d", [CUDA]), ("auto", [torch.device("cpu")])):
            select.intended_transport(choice, group, devices, collective=True)
    assert [record.message for record in caplog.records] == [
        "torch 2.15.0 is newer than 2.11, the newest tested on GPUs: torchddp chooses its own NCCL communicator",
        "torch 2.16.1 is newer than 2.11, the newest tested on GPUs: torchddp reduces through the process group: the "
        "process group's backend is SimpleNamespace",
    ]


def test_a_gpu_model_in_a_build_without_cuda_is_warned_about_once(group_of, monkeypatch, caplog):
    monkeypatch.setattr("torchddp.transport.store._logged", set())
    group = group_of("nccl", with_cuda=False)
    for devices in ([torch.device("cpu")], [CUDA], [CUDA]):
        select.intended_transport("auto", group, devices, collective=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "built without CUDA, which is slow. " in record.message and "CUDA variant" in record.message


def test_nccl_refuses_models_that_are_not_on_one_gpu(monkeypatch):
    monkeypatch.delenv("TORCHDDP_TRANSPORT", raising=False)
    for devices, words in each((([torch.device("cpu")], "cpu"), ([CUDA, torch.device("cuda", 1)], "cuda:0 and "))):
        with pytest.raises(ValueError, match=f"one CUDA device, but there are parameters on {words}"):
            select.intended_transport("nccl", Group(), devices, collective=True)
