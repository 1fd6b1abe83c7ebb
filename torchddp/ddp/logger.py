"""The data of ``model._get_ddp_logging_data()``: torch's fields, filled from our reducer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp.session import ReducerSession

# Variables. Fields have their names in lower case, those of NCCL without TORCH_.
_ENVIRONMENT = """MASTER_PORT MASTER_ADDR TORCH_DISTRIBUTED_DEBUG CUDA_VISIBLE_DEVICES
    GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT""".split()
_NCCL_ENVIRONMENT = """NCCL_SOCKET_IFNAME TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING
    NCCL_DEBUG NCCL_NTHREADS NCCL_IB_TIMEOUT""".split()
# torch's ProcessGroupGloo default, which it does not expose.
_GLOO_THREADS = 2
_ALWAYS_SAMPLED = 10


@dataclass
class DDPLoggingData:
    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class DDPLogger(dist.Logger):
    """A ``torch.distributed.Logger`` that reads its fields from our reducer on demand.

    torch's functions accept only torch's class, and that only torch's reducer, so the base class holds one of a scalar.
    """

    def __init__(self, reducer: _C.Reducer, process_group: dist.ProcessGroup) -> None:
        self._anchor = dist.Reducer([torch.zeros(1, requires_grad=True)], [[0]], [4], process_group)
        super().__init__(self._anchor)
        self._reducer = reducer
        self.sample_rate = 100
        self._fixed = DDPLoggingData()

    def rebind(self, process_group: dist.ProcessGroup) -> None:
        """Release the old process group."""
        self._anchor._update_process_group(process_group)
        self._fixed.ints_map.update(world_size=process_group.size(), rank=process_group.rank())

    def log_construction(self, ddp: TorchDDP, session: ReducerSession) -> None:
        parameters = session.parameters
        # Groups unknown to torch (torchft's) name their backend themselves.
        known = _torch.is_alive(ddp.process_group)
        backend = dist.get_backend(ddp.process_group) if known else ddp.process_group.name()
        dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
        strings = self._fixed.strs_map
        strings["module_name"] = type(ddp.module).__name__
        strings["device_ids"] = ", ".join(str(d) for d in ddp.device_ids or [])
        strings["backend_name"] = backend
        strings["dtypes"] = ", ".join(_TORCH_DTYPE_NAMES.get(d, d) for d in dtypes)
        strings.update({name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT})
        for name in _NCCL_ENVIRONMENT if "nccl" in backend else ():
            strings[name.removeprefix("TORCH_").lower()] = os.environ.get(name, "N/A")
        strings["bucket_sizes"] = self._bucket_sizes()
        # The caps in use; the last one repeats.
        strings["bucket_caps_bytes"] = ", ".join(map(str, session.bucket_caps_bytes))
        self._fixed.ints_map.update(
            world_size=ddp.process_group.size(),
            rank=ddp.process_group.rank(),
            output_device=-1 if ddp.output_device is None else ddp.output_device,
            broadcast_buffers=int(ddp.broadcast_buffers),
            has_sync_bn=int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules())),
            bucket_cap_bytes=ddp.bucket_bytes_cap,
            find_unused_parameters=int(ddp.find_unused_parameters),
            # What the user asked for, and what is in effect.
            gradient_as_bucket_view=int(bool(session.options.gradient_as_bucket_view)),
            gradients_are_bucket_views=int(ddp.gradient_as_bucket_view),
            is_multi_device_module=int(ddp.is_multi_device_module),
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(p.numel() * p.element_size() for p in parameters),
        )
        if backend == "gloo":
            self._fixed.ints_map["gloo_num_threads"] = _GLOO_THREADS

    def _bucket_sizes(self) -> str:
        return ", ".join(str(bucket.nbytes) for bucket in self._reducer.plan.buckets)

    def set_runtime_stats_and_log(self) -> None:
        """No-op: fields are read on demand."""

    def _set_static_graph(self) -> None:
        self._fixed.ints_map["static_graph"] = 1  # the base class would read it from its reducer

    def _get_ddp_logging_data(self) -> DDPLoggingData:  # type: ignore[override]
        reducer = self._reducer
        stats = dict(reducer.stats())
        steps_finished = stats.pop("finished")
        events = super()._get_ddp_logging_data()  # what torch has told the base class: hooks, errors, join()
        data = DDPLoggingData(events.strs_map | self._fixed.strs_map, events.ints_map | self._fixed.ints_map)
        # The last sampled one: the first ten are sampled, then every ``sample_rate``-th.
        iteration = max(0, stats.pop("iteration") - 1)
        data.ints_map["iteration"] = min(iteration, max(_ALWAYS_SAMPLED, iteration - iteration % self.sample_rate))
        # As in torch, has_rebuilt_buckets ignores rebuilds under find_unused_parameters.
        rebuilt = reducer.has_rebuilt_buckets
        static, searches = data.ints_map.get("static_graph", 0), data.ints_map["find_unused_parameters"]
        if steps_finished:
            data.ints_map.update(stats)
            data.ints_map["num_bucket_rebuilds"] = int(rebuilt)
            data.ints_map["has_rebuilt_buckets"] = int(rebuilt and (static or not searches))
            data.ints_map["unused_parameter_size"] = reducer.unused_bytes()
            data.strs_map["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.grad_ready_order()))
        if rebuilt:
            data.strs_map["rebuilt_bucket_sizes"] = self._bucket_sizes()
            data.strs_map["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.params)) for bucket in reducer.plan.buckets
            )
        if not static:
            # Known only if steps were compared, and of use only where the graph is searched: Lightning then advises it.
            compared = steps_finished > 1 and bool(searches)
            data.ints_map["can_set_static_graph"] = int(compared and reducer.graph_has_been_static())
        data.strs_map["transport"] = reducer.transport_name
        if error := reducer.last_error():
            data.ints_map["has_error"] = 1
            data.strs_map["error"] = error
        return data


# torch logs C++ type names.
_TORCH_DTYPE_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
