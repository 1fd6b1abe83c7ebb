"""Writes files safely in folders that others may read or write."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Create or replace a file atomically; OSError if that fails.

    Never writes to an existing file and follows no link, because in a folder that others can write to, such as
    ``/tmp``, a link may point to any of the user's files. ``mode``: the file's permissions, before the umask.
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
