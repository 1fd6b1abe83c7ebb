"""Checkpoints of OSS with torch.distributed.checkpoint: saved by all ranks, loaded on any number of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from torchddp import _torch
from torchddp.sharded.oss import OSS
from torchddp.transport.agreement import Agreement

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes half a second, so only loading does it
    from torch.distributed.checkpoint.storage import StorageReader


def load_checkpoint(
    optimizer: OSS,
    key: str = "optim",
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
) -> None:
    """Load what all ranks saved with ``dcp.save({key: optimizer.local_state_dict(), ...})``. Collective.

    Works on any number of ranks; each reads only the state of its own parameters, through the CPU.

    Example:

        import torch.distributed.checkpoint as dcp

        optimizer = torchddp.optim.OSS(module.parameters())
        dcp.save({"optim": optimizer.local_state_dict()}, checkpoint_id="saved")
        torchddp.optim.load_checkpoint(optimizer, "optim", checkpoint_id="saved")

    Args:
        optimizer: the OSS to load into, over the same parameters as the saved one.
        key: where the optimizer is in the saved dict.
        checkpoint_id: the checkpoint's folder.
        storage_reader: a reader for storage other than a folder.

    Raises:
        ValueError: neither a folder nor a reader; no optimizer under ``key``, or another model's.
        OSError: the checkpoint can't be read. An error on one rank is a RuntimeError on the others.
    """
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    with Agreement("load_checkpoint", optimizer.process_group) as agreement:
        if storage_reader is None:
            if checkpoint_id is None:
                raise ValueError("load_checkpoint needs checkpoint_id or storage_reader")
            storage_reader = filesystem.FileSystemReader(checkpoint_id)
        metadata = storage_reader.read_metadata()
        # The path of each saved value in local_state_dict(): ("state", "0", "exp_avg"), ("param_groups", 0, "lr").
        paths = {name: path[1:] for name, path in (metadata.planner_data or {}).items() if path[0] == key and path[1:]}
        group_names = [name for name, path in paths.items() if path[0] == "param_groups"]
        if not group_names:
            raise ValueError(f"the checkpoint holds no optimizer under {key!r}")
        agreement.verify(options={"key": repr(key)})
    saved = metadata.state_dict_metadata
    group_values = {name: _blank(saved[name], "cpu") for name in group_names}
    state_dict_loader.load(group_values, storage_reader=storage_reader, process_group=optimizer.process_group)
    groups = _torch.unflatten_state_dict(group_values, paths)["param_groups"]

    def state_of(values: dict[str, Any]) -> dict[Any, Any]:
        """By parameter index; torch.distributed.checkpoint turns the keys of dicts into strings."""
        state = _torch.unflatten_state_dict(values, paths).get("state", {})
        return {int(key) if key.isdigit() else key: entry for key, entry in state.items()}

    state_names = [name for name, path in paths.items() if path[0] == "state"]
    shapes = state_of({name: _blank(saved[name], "meta") for name in state_names})
    with Agreement("load_checkpoint", optimizer.process_group) as agreement:
        by_index, _ = optimizer._check_state({"state": shapes, "param_groups": groups})
        agreement.verify()
    mine = optimizer.assign_owners(by_index)
    others = {str(index) for index in shapes if isinstance(index, int)} - {str(index) for index in mine}
    values = {name: _blank(saved[name], "cpu") for name in state_names if str(paths[name][1]) not in others}
    state_dict_loader.load(values, storage_reader=storage_reader, process_group=optimizer.process_group)
    optimizer.load_state_dict({"state": state_of(values), "param_groups": groups, "sharded_params": mine})


def _blank(saved: object, device: str) -> torch.Tensor | None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(saved, TensorStorageMetadata):
        return None
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
