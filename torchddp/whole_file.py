"""Reads and writes files safely in folders that others may read or write."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

_LARGEST_BYTES = 64 * 2**20


def parse_json(text: str) -> Any:
    """ValueError if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """Parse a file that somebody else may have put there; never waits.

    OSError if it can't be read or is not a regular file (a link isn't one); ValueError if it is too large or not JSON.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size > _LARGEST_BYTES:
            raise ValueError(f"it has {found.st_size} bytes, more than {_LARGEST_BYTES}")
        return parse_json(file.read(_LARGEST_BYTES))


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Create or replace a file atomically; OSError if that fails. ``mode``: before the umask.

    Follows no link: in a folder that others can write to, one may point to any of the user's files.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, mode)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
