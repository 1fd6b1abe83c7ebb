"""ParallelConfig: options, files, command lines and error messages; layouts of ranks; blocks to wrap."""

import dataclasses
import datetime
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tests.harness import assert_each_raises, each
from torchddp import Precision
from torchddp.parallel.apply import blocks_of
from torchddp.parallel.config import ParallelConfig
from torchddp.parallel.groups import plan_layout

pytestmark = pytest.mark.beyond_torch("has no ParallelConfig")


def test_invalid_options_are_refused():
    cases = (
        ({"kind": "fdsp"}, ValueError, ["kind: got 'fdsp'", "did you mean 'fsdp'?", "hsdp"]),
        ({"kind": None}, TypeError, ["kind: got None", "a string"]),
        ({"use_fsdp": 1}, TypeError, ["use_fsdp: got 1 (int), allowed: true or false"]),
        ({"model_parallel": 0}, ValueError, ["model_parallel: got 0, allowed: 1 or more"]),
        ({"model_parallel": True}, TypeError, ["model_parallel: got True (bool), allowed: a whole number"]),
        ({"use_fsdp": True, "forward_prefetch": -1}, ValueError, ["forward_prefetch: got -1"]),
        ({"use_fsdp": True, "sharding_strategy": "FULL"}, ValueError, ["did you mean 'FULL_SHARD'?", "NO_SHARD"]),
        ({"use_fsdp": True, "param_dtype": "bf16"}, ValueError, ["param_dtype: got 'bf16'", "bfloat16"]),
        ({"use_fsdp": True, "wrap": "Block"}, TypeError, ["wrap: got 'Block'", "a list of classes"]),
        ({"use_fsdp": True, "wrap": [3]}, TypeError, ["wrap: got 3"]),
        ({"ddp": 3}, TypeError, ["ddp: got 3", "a table"]),
        ({"ddp": {"bucket_cap_md": 4}}, ValueError, ["ddp.bucket_cap_md", "did you mean 'bucket_cap_mb'?"]),
        ({"ddp": {"process_group": None}}, ValueError, ["ddp.process_group: use model_parallel"]),
        ({"ddp": {"init_sync": False}}, ValueError, ["ddp.init_sync: use sync_module_states"]),
        ({"kind": "sharded", "ddp": {"bucket_cap_mb": 4}}, ValueError, ["unknown option of ShardedDataParallel"]),
        ({"kind": "none", "ddp": {"bucket_cap_mb": 4}}, ValueError, ["ddp.bucket_cap_mb with kind 'none'"]),
        ({"sharding_strategy": "FULL_SHARD"}, ValueError, ["without use_fsdp"]),
        ({"kind": "ddp", "use_fsdp": True}, ValueError, ["use_fsdp with kind 'ddp'"]),
        ({"kind": "hsdp", "sharding_strategy": "FULL_SHARD"}, ValueError, ["allowed: HYBRID_SHARD"]),
        ({"cpu_offload": True}, ValueError, ["cpu_offload with kind 'ddp'", "FSDP2", "DeepSpeed"]),
        ({"kind": "sharded", "cpu_offload": True}, ValueError, ["cpu_offload with kind 'sharded'"]),
        ({"param_dtype": "bfloat16"}, ValueError, ["param_dtype with kind 'ddp'"]),
        ({"wrap": ()}, ValueError, ["wrap with kind 'ddp'"]),
        ({"use_fsdp": True, "ddp": {"bucket_cap_mb": 4}}, ValueError, ["ddp.bucket_cap_mb with FSDP"]),
        ({"kind": "sharded", "model_parallel": 2}, ValueError, ["model_parallel 2 with kind 'sharded'"]),
    )
    for options, error, words in each(cases):
        with pytest.raises(error) as caught:
            ParallelConfig(**options)
        assert type(caught.value) is error
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_config_is_frozen_hashable_and_plain():
    config = ParallelConfig(ddp={"timeout": datetime.timedelta(seconds=3), "precision": Precision(wire=torch.bfloat16)})
    assert config.ddp == {"timeout": 3.0, "precision.wire": "bfloat16"}
    assert hash(config) == hash(ParallelConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "ddp"
    assert ParallelConfig(use_fsdp=True, param_dtype=torch.bfloat16).param_dtype == "bfloat16"


def test_a_config_is_read_from_a_section_of_a_file(tmp_path: Path):
    path = tmp_path / "train.toml"
    text = 'model = {}\n[train.parallel]\nuse_fsdp = true\nsharding_strategy = "SHARD_GRAD_OP"\nwrap = ["Block"]'
    path.write_text(text)
    (tmp_path / "empty.yaml").write_text("")
    assert ParallelConfig.from_file(tmp_path / "empty.yaml") == ParallelConfig()
    expected = ParallelConfig(use_fsdp=True, sharding_strategy="SHARD_GRAD_OP", wrap=("Block",))
    assert ParallelConfig.from_file(path, "train.parallel") == expected
    with pytest.raises(ValueError, match=r"train\.toml: there is no section 'parallel' \(found: model, train\)"):
        ParallelConfig.from_file(path, "parallel")
    with pytest.raises(ValueError, match=r"train\.toml: unknown option 'model'"):
        ParallelConfig.from_file(path)


def test_json_yaml_and_toml_files_round_trip(tmp_path: Path):
    expected = ParallelConfig(
        wrap=("A", "B.C"), use_fsdp=True, model_parallel=2, param_dtype="bfloat16", sync_module_states=False
    )
    options = {"bucket_cap_mb": 2.5, "static_graph": True, "transport": "é\x7f", "comm_hook": None}
    for config in (expected, ParallelConfig(ddp=options)):
        for name, text in (("a.json", json.dumps(config.as_dict())), ("a.yaml", yaml.safe_dump(config.as_dict()))):
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert ParallelConfig.from_file(tmp_path / name) == config, name
    text = 'model_parallel = 2\nddp = { timeout = inf, transport = "é\\u007f", bucket_cap_mb = 3 }'
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    values = {"timeout": float("inf"), "transport": "é\x7f", "bucket_cap_mb": 3}
    assert ParallelConfig.from_file(tmp_path / "a.toml") == ParallelConfig(model_parallel=2, ddp=values)


def test_errors_in_a_file_name_the_file_and_the_option(tmp_path: Path):
    cases = (
        ("a.toml", "use_fsdp = 1", TypeError, "a.toml: use_fsdp: got 1 (int), allowed: true or false"),
        ("a.toml", "use_fsdp = ", ValueError, "a.toml: "),
        ("a.json", "{", ValueError, "a.json: "),
        ("a.json", "[]", TypeError, "a.json: the file is a list, allowed: a table of options"),
        ("a.yaml", "kind: [", ValueError, "a.yaml: "),
        ("a.yml", "3: 4", TypeError, "a.yml: option 3 is not a string"),
        ("a.yml", "ddp: {3: 4}", ValueError, "a.yml: ddp.3: unknown option"),
        ("a.ini", "", ValueError, "got the suffix '.ini', allowed: .toml, .yaml, .yml, .json"),
    )
    for name, text, error, words in each(cases):
        (tmp_path / name).write_text(text)
        assert_each_raises((partial(ParallelConfig.from_file, tmp_path / name), error, words))


def test_a_missing_parser_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("yaml", "tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, package in (("a.yaml", "PyYAML"), ("a.toml", "tomli")):
        (tmp_path / name).touch()
        with pytest.raises(ImportError, match=package):
            ParallelConfig.from_file(tmp_path / name)


def test_a_config_is_read_from_command_line_arguments():
    args = ["--use-fsdp", "--sharding-strategy=FULL_SHARD", "wrap=Block, Head", "--model-parallel", "2"]
    expected = {"use_fsdp": True, "sharding_strategy": "FULL_SHARD", "wrap": ("Block", "Head"), "model_parallel": 2}
    config = ParallelConfig.from_cli([*args, "--no-sync-module-states", "--param-dtype", "bfloat16"])
    assert config == ParallelConfig(**expected, sync_module_states=False, param_dtype="bfloat16")
    options = ["ddp.bucket_cap_mb=4", "ddp.static-graph=True", "--ddp.transport=c10d", "ddp.timeout=2.5"]
    config = ParallelConfig.from_cli(options)
    assert config.ddp == {"bucket_cap_mb": 4, "static_graph": True, "transport": "c10d", "timeout": 2.5}
    more = ParallelConfig.from_cli(["ddp.bucket_cap_mb=none"], base=config)
    assert more.ddp == {**config.ddp, "bucket_cap_mb": None}
    assert ParallelConfig.from_cli(["use_fsdp=false", "wrap=none"], base=ParallelConfig(use_fsdp=True)).wrap is None
    cases = (
        (["--use-fdsp"], ValueError, "--use-fdsp has no value"),
        (["--use-fdsp=true"], ValueError, "command line: unknown option 'use_fdsp'; did you mean 'use_fsdp'?"),
        (["fsdp"], ValueError, "command line: got 'fsdp', allowed: --option"),
        (["--model-parallel", "two"], TypeError, "model_parallel: got 'two' (str), allowed: a whole number"),
        (["use_fsdp=maybe"], TypeError, "use_fsdp: got 'maybe'"),
        (["kind.x=3"], ValueError, "unknown option 'kind.x'"),
    )
    assert_each_raises(*((partial(ParallelConfig.from_cli, args), *expected) for args, *expected in cases))


def test_classes_to_wrap_are_written_by_name_and_functions_are_refused():
    with pytest.raises(TypeError, match=r"ddp\.comm_hook: a function can't be written"):
        ParallelConfig(ddp={"comm_hook": layout}).as_dict()
    config = ParallelConfig(use_fsdp=True, wrap=(nn.Linear,))
    read = ParallelConfig.from_mapping(config.as_dict())
    assert read.wrap == ("torch.nn.modules.linear.Linear",)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert blocks_of(model, read.wrap) == blocks_of(model, config.wrap) == [model[0]]


def layout(world_size: int, host: int = 4, tensor_parallel: bool = False, **options):
    return plan_layout(ParallelConfig(**options), world_size, host, tensor_parallel)


def test_layouts_follow_from_the_config_and_the_world_size():
    for world_size, options, expected in (
        (1, {}, ("none", 1, 1)),
        (1, {"kind": "sharded"}, ("none", 1, 1)),
        (8, {}, ("ddp", 8, 1)),
        (8, {"kind": "none"}, ("none", 8, 1)),
        (8, {"kind": "sharded"}, ("sharded", 8, 1)),
        (8, {"use_fsdp": True}, ("fsdp", 8, 1)),
        (8, {"kind": "hsdp"}, ("hsdp", 2, 4)),
        (6, {"kind": "hsdp"}, ("hsdp", 1, 6)),  # hosts of four and two ranks
        (8, {"kind": "hsdp", "model_parallel": 2}, ("hsdp", 4, 2)),
        (8, {"kind": "hsdp", "data_parallel": 8}, ("hsdp", 8, 1)),
        (8, {"model_parallel": 4, "tensor_parallel": True}, ("ddp", 2, 4)),
        (8, {"model_parallel": 8, "tensor_parallel": True}, ("none", 1, 8)),
        (8, {"use_fsdp": True, "model_parallel": 2, "tensor_parallel": True}, ("fsdp", 4, 2)),
    ):
        found = layout(world_size, **options)
        assert (found.kind, found.data_parallel, found.model_parallel) == expected, options
    strategies = None, "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
    found = [layout(4, host=2, use_fsdp=True, sharding_strategy=strategy) for strategy in strategies]
    assert [one.reshard_after_forward for one in found] == [True, True, False, False, True, False]
    assert [one.replicates for one in found] == [False, False, False, True, False, False]
    assert [one.kind for one in found] == ["fsdp"] * 4 + ["hsdp"] * 2
    cases = (
        ({"data_parallel": 3}, "data_parallel 3 x model_parallel 1 is 3, but there are 4 ranks"),
        ({"kind": "hsdp", "model_parallel": 3}, "data_parallel 1 x model_parallel 3 is 3"),
        ({"model_parallel": 2}, "without a tensor parallel plan"),
        ({"use_fsdp": True, "model_parallel": 2}, "or use kind 'hsdp'"),
        ({"tensor_parallel": True}, "DTensors, but model_parallel is 1"),
        ({"kind": "hsdp", "model_parallel": 2, "tensor_parallel": True}, "on a model of DTensors"),
        ({"kind": "sharded", "tensor_parallel": True}, "on a model of DTensors"),
    )
    for options, words in each(cases):
        assert_each_raises((partial(layout, 4, **options), ValueError, words))


class Block(nn.Sequential):
    pass


class Blocks(nn.Sequential):
    pass


class Metric(nn.Module):
    """Compares as those of torchmetrics do: the result is a metric of both."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return Metric()


def test_repeated_blocks_are_found():
    blocks = [Block(nn.ModuleList(nn.Linear(2, 2) for _ in range(2))) for _ in range(3)]
    norm = nn.LayerNorm(2)
    head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), norm, nn.ReLU())
    model = Blocks(nn.Embedding(2, 2), nn.ModuleList(blocks), head)
    assert blocks_of(model, None) == blocks  # not their submodules, and not the head's single Linear
    assert blocks_of(model, ()) == []
    assert blocks_of(model, ("Block", nn.LayerNorm)) == [*blocks, norm]
    assert blocks_of(model, (Blocks, Block)) == blocks  # never the model itself
    both = blocks_of(model, ("Linear", "Block"))
    assert both.index(blocks[0]) < both.index(blocks[0][0][0])  # outer modules first
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), Metric()), ("Linear",))[1:] == []
    with pytest.raises(ValueError, match=r"no module of class 'Blok'; did you mean 'Block'\? .*allowed: Blocks, "):
        blocks_of(model, ("Blok",))
