"""The training text, and which bytes of it each rank sees in each step.

Checkpoints need no data position: a batch is a pure function of (seed, step, rank), so a resumed run draws the same
batches as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.gpt.errors import ExampleError

VALIDATION_SHARE = 10  # one tenth of the text is kept for validation
# Third-party packages differ between machines, and some distributions leave the tests out.
_NOT_THE_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to validate on, with a digest that identifies the corpus."""

    source: str
    train: torch.Tensor
    validation: torch.Tensor
    sha256: str

    @property
    def size_bytes(self) -> int:
        return self.train.numel() + self.validation.numel()


def load_corpus(path: Path | None, block_size: int) -> Corpus:
    """Read `path` (a file, a folder, or None for Python's own source files) and split off the validation text."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source, files = f"Python's own source files in {root}", python_source_files(root)
        if not files:
            raise ExampleError(f"no .py files in {root} (is this Python zipped?): choose a text with --data PATH")
    else:
        source, files = str(path), data_files(path)
    text = read_files(files)
    if not text:
        raise ExampleError(f"no data: {source} is empty")
    train_bytes = split_point(len(text), block_size, source)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(source, tokens[:train_bytes], tokens[train_bytes:], hashlib.sha256(text).hexdigest())


def python_source_files(root: Path) -> list[Path]:
    """The standard library's .py files below `root`, in an order that does not depend on the file system."""
    return _sorted_files(root, skipped_folders=_NOT_THE_STANDARD_LIBRARY, suffix=".py")


def data_files(path: Path) -> list[Path]:
    """`path` itself, or every file below it except hidden ones, sorted by relative path."""
    if path.is_dir():
        files = _sorted_files(path)
        if not files:
            raise ExampleError(f"no data: the folder {path} holds no files")
        return files
    if not path.exists():
        raise ExampleError(f"no such data: {path}")
    return [path]


def _sorted_files(root: Path, skipped_folders: frozenset[str] = frozenset(), suffix: str = "") -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    files = [path for path in found if path.is_file()]  # no dangling links, sockets or pipes
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_files(files: Iterable[Path]) -> bytes:
    """The files' bytes, joined by line breaks."""
    parts = []
    for path in files:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise ExampleError(f"cannot read data {path}: {error.strerror}") from error
    return b"\n".join(parts)


def split_point(size_bytes: int, block_size: int, source: str) -> int:
    """Where the training text ends; each part must hold one block and the byte that follows it."""
    window_bytes = block_size + 1
    if size_bytes < 2 * window_bytes:
        raise ExampleError(
            f"data too short: {source} has {size_bytes} bytes, --block-size {block_size} needs at least "
            f"{2 * window_bytes} (training and validation, {window_bytes} each)"
        )
    return size_bytes - max(size_bytes // VALIDATION_SHARE, window_bytes)


def batch_offsets(*, seed: int, index: int, rank: int, world_size: int, batch_size: int, choices: int) -> torch.Tensor:
    """Offsets of this rank's windows in micro-batch number `index`, each in [0, choices).

    Every rank draws the whole global batch and takes its own slice, so ranks use disjoint parts of one random stream.
    """
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    everyone = torch.randint(choices, (world_size, batch_size), generator=generator)
    return everyone[rank]


def validation_offsets(*, size_bytes: int, block_size: int, windows: int) -> torch.Tensor:
    """`windows` evenly spaced window starts, the same at every evaluation."""
    return torch.linspace(0, size_bytes - block_size - 1, windows, dtype=torch.float64).long()


def windows_at(text: torch.Tensor, offsets: torch.Tensor, block_size: int, device: torch.device) -> Batch:
    """Inputs and the targets shifted by one byte, both (len(offsets), block_size)."""
    tokens = text[offsets[:, None] + torch.arange(block_size + 1)].to(device=device, dtype=torch.long)
    return tokens[:, :-1], tokens[:, 1:]
