"""What ``model._get_ddp_logging_data()`` reports: torch's fields, filled from the reducer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torchddp.distributed import DistributedDataParallel

_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
_NCCL_ENVIRONMENT = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}


@dataclass
class DDPLoggingData:
    """The shape of torch's C++ struct of the same name."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class DDPLogger:
    """Stands in for ``torch.distributed.Logger``, which takes only torch's own reducer.

    Nothing is gathered while training runs: the fields are read off the reducer when somebody asks.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer
        self._fixed = DDPLoggingData()
        self._events = DDPLoggingData()

    def set_construction_data_and_log(self, ddp: DistributedDataParallel, parameters: list[Any]) -> None:
        """Take down what does not change after construction."""
        backend = dist.get_backend(ddp.process_group)
        dtypes = list(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters))
        strings = self._fixed.strs_map
        strings["module_name"] = type(ddp.module).__name__
        strings["device_ids"] = ", ".join(str(d) for d in ddp.device_ids or [])
        strings["backend_name"] = backend
        strings["dtypes"] = ", ".join(_TORCH_DTYPE_NAMES.get(d, d) for d in dtypes)
        environment = _ENVIRONMENT | (_NCCL_ENVIRONMENT if "nccl" in backend else {})
        strings.update({key: os.environ.get(variable, "N/A") for key, variable in environment.items()})
        self._fixed.ints_map.update(
            world_size=ddp.process_group.size(),
            rank=ddp.process_group.rank(),
            output_device=-1 if ddp.output_device is None else ddp.output_device,
            broadcast_buffers=int(ddp.broadcast_buffers),
            has_sync_bn=int(ddp._has_sync_batch_norm),
            bucket_cap_bytes=ddp.bucket_bytes_cap,
            find_unused_parameters=int(ddp.find_unused_parameters),
            gradient_as_bucket_view=int(ddp.gradient_as_bucket_view),
            is_multi_device_module=int(ddp.is_multi_device_module),
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(p.numel() * p.element_size() for p in parameters),
        )
        if backend == "gloo":
            self._fixed.ints_map["gloo_num_threads"] = 2
        strings["bucket_sizes"] = self._bucket_sizes()

    def _bucket_sizes(self) -> str:
        return ", ".join(str(bucket.nbytes) for bucket in self._reducer.plan.buckets)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing to do: see the class."""

    def set_error_and_log(self, error: str) -> None:
        self._events.ints_map["has_error"] = 1
        self._events.ints_map["iteration"] = self._reducer._stats()["iteration"]
        self._events.strs_map["error"] = error

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._events.strs_map["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._events.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._events.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        reducer = self._reducer
        stats = dict(reducer._stats())
        steps_finished = stats.pop("finished")
        exposed = stats.pop("exposed_comm_time")
        data = DDPLoggingData(dict(self._fixed.strs_map), dict(self._fixed.ints_map))
        data.ints_map["iteration"] = stats["iteration"]
        if steps_finished:
            data.ints_map.update(stats)
            data.ints_map["exposed_comm_time"] = exposed
            data.ints_map["num_buckets_reduced"] = len(reducer.plan)
            data.ints_map["has_rebuilt_buckets"] = int(reducer.has_rebuilt_buckets)
            data.ints_map["unused_parameter_size"] = reducer._num_unused()
            data.strs_map["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer._grad_ready_order()))
        if error := reducer._last_error():
            data.ints_map["has_error"] = 1
            data.strs_map["error"] = error
        if reducer.has_rebuilt_buckets:
            data.strs_map["rebuilt_bucket_sizes"] = self._bucket_sizes()
            data.strs_map["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.params)) for bucket in reducer.plan.buckets
            )
        if "static_graph" not in self._events.ints_map:
            data.ints_map["can_set_static_graph"] = int(reducer._ddp_graph_static())
        data.strs_map["transport"] = reducer.transport_name
        data.strs_map.update(self._events.strs_map)
        data.ints_map.update(self._events.ints_map)
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
