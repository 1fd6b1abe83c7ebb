"""Options from files and command lines, and back to command lines."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FLAGS = ("use_fsdp", "cpu_offload", "sync_module_states")
NUMBERS = ("model_parallel", "data_parallel", "forward_prefetch", "backward_prefetch")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SUFFIXES = ".toml, .yaml, .yml, .json"


def read_file(path: str | os.PathLike[str], section: str | None) -> dict[str, Any]:
    """The table of options in a file: see ParallelConfig.from_file."""
    path = Path(path)
    table = _parse(path)
    for name in section.split(".") if section else ():
        if not isinstance(table, Mapping) or name not in table:
            found = ", ".join(map(str, table)) if isinstance(table, Mapping) else "no table"
            raise ValueError(f"{path}: there is no section '{section}' (found: {found})")
        table = table[name]
    where = f"section '{section}'" if section else "the file"
    if table is None:  # an empty YAML file
        return {}
    if not isinstance(table, Mapping):
        raise TypeError(f"{path}: {where} is a {type(table).__name__}, allowed: a table of options")
    bad = [key for key in table if not isinstance(key, str)]
    if bad:
        raise TypeError(f"{path}: option {bad[0]!r} is not a string")
    return dict(table)


def _parse(path: Path) -> object:
    if path.suffix not in _SUFFIXES.split(", "):
        raise ValueError(f"{path}: got the suffix '{path.suffix}', allowed: {_SUFFIXES}")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        parser, errors = _toml_parser(path), ValueError  # TOMLDecodeError is one
        load = parser.loads
    elif path.suffix == ".json":
        load, errors = json.loads, ValueError
    else:
        parser = _needed("yaml", path, "PyYAML")
        load, errors = parser.safe_load, parser.YAMLError
    try:
        return load(text)
    except errors as error:
        raise ValueError(f"{path}: {error}") from None


def _toml_parser(path: Path) -> Any:
    try:
        return importlib.import_module("tomllib")  # Python 3.11
    except ModuleNotFoundError:
        return _needed("tomli", path, "tomli (Python 3.10 has no parser for TOML)")


def _needed(module: str, path: Path, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ImportError(f"{path}: to read it, pip install {package}") from None


def read_arguments(args: Iterable[str]) -> dict[str, Any]:
    """Options by name: see ParallelConfig.from_cli. Names are not checked here, but flags and numbers are parsed."""
    found: dict[str, Any] = {}
    waiting = list(args)
    while waiting:
        argument = waiting.pop(0)
        text: str | None
        key, has_value, text = argument.partition("=")
        if not (argument.startswith("--") or has_value):
            raise ValueError(f"command line: got '{argument}', allowed: --option, --option=value, option=value")
        name, _, option = key.removeprefix("--").partition(".")
        name, option = name.replace("-", "_"), option.replace("-", "_")
        if not has_value:
            if name in FLAGS:
                text = "true"
            elif name.removeprefix("no_") in FLAGS:
                name, text = name.removeprefix("no_"), "false"
            elif waiting:
                text = waiting.pop(0)
            else:
                text = None
        if text is None or (not has_value and text.startswith("--")):
            raise ValueError(f"command line: {key} has no value: {key}=VALUE")
        if name == "ddp" and option:
            found.setdefault("ddp", {})[option] = _guessed(text)
        else:
            full = f"{name}.{option}" if option else name
            found[full] = _value(full, text)
    return found


def _value(name: str, text: str) -> object:
    """The value of the option ``name``. A value that can't be parsed stays a string, which the config rejects."""
    if name != "kind" and text.lower() in ("none", "null"):
        return None
    if name in FLAGS:
        return _WORDS.get(text.lower(), text)
    if name in NUMBERS:
        try:
            return int(text)
        except ValueError:
            return text
    if name == "wrap":
        return [item.strip() for item in text.split(",")] if text else []
    return text


def _guessed(text: str) -> object:
    """A value of unknown type: parsed as JSON, or as none, True or False, or else a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (str, int, float)) else text


def written_arguments(values: Mapping[str, Any]) -> list[str]:
    """Arguments that `read_arguments` parses back to ``values``."""
    written = []
    for name, value in values.items():
        if name == "ddp":
            written += [f"ddp.{option}={_written(inner)}" for option, inner in value.items()]
        elif isinstance(value, list):
            written.append(f"{name}={','.join(value)}")
        else:
            written.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    return written


def _written(value: object) -> str:
    if isinstance(value, str) and _guessed(value) == value:
        return value
    return json.dumps(value)
