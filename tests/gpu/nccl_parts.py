"""A libnccl.so.2 that is too large to be carried in one piece: cut into parts, and joined again where it is used.

`nccl_parts.py split LIBRARY FOLDER [MIB]` writes libnccl.so.2.part00, .part01 ... of at most MIB (16) each, and
libnccl.so.2.sha256. `nccl_parts.py join FOLDER OUT` writes the library of such a folder to the folder OUT and prints
its path. A library that was packed with xz (libnccl.so.2.xz) is unpacked on the way.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import sys
from pathlib import Path

NAME = "libnccl.so.2"
PART = re.compile(r"(libnccl\.so\.2(?:\.xz)?)\.part(\d+)")
DEFAULT_MIB = 16


class PartsError(ValueError):
    """The parts are no library; the message says what is wrong, and where."""


def split(library: Path, folder: Path, part_bytes: int) -> None:
    """Parts of the library, numbered from 00, and the checksum of the whole."""
    if library.name not in (NAME, f"{NAME}.xz"):
        raise PartsError(f"the library must be called {NAME} or {NAME}.xz, not {library.name}")
    folder.mkdir(parents=True, exist_ok=True)
    data = library.read_bytes()
    for number, begin in enumerate(range(0, len(data), part_bytes)):
        (folder / f"{library.name}.part{number:02d}").write_bytes(data[begin : begin + part_bytes])
    (folder / f"{library.name}.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  {library.name}\n")


def parts_of(folder: Path) -> tuple[str, list[Path]]:
    """What the parts make up, and their paths in order. `PartsError` names the part that is missing."""
    matches = [match for path in folder.iterdir() if (match := PART.fullmatch(path.name))]
    names = sorted({match[1] for match in matches})
    if not names:
        raise PartsError(f"there is no {NAME}.part00 in {folder}")
    if len(names) > 1:
        raise PartsError(f"there are parts of {' and of '.join(names)} in {folder}: keep one")
    name, found = names[0], {int(match[2]): folder / match[0] for match in matches}
    for number in range(max(found) + 1):
        if number not in found:
            raise PartsError(f"{name}.part{number:02d} is missing in {folder}, which has parts up to {max(found):02d}")
    return name, [found[number] for number in range(len(found))]


def join(folder: Path, out: Path) -> Path:
    """The library, written to `out`. `PartsError` if the parts are not all there, or are not what was split."""
    name, parts = parts_of(folder)
    data = b"".join(part.read_bytes() for part in parts)
    checksum = folder / f"{name}.sha256"
    if checksum.is_file():
        wanted, got = checksum.read_text().split()[0], hashlib.sha256(data).hexdigest()
        if got != wanted:
            raise PartsError(
                f"the {len(parts)} parts of {name} in {folder} have {len(data)} bytes with SHA-256 {got}, "
                f"{checksum.name} wants {wanted}: copy them again"
            )
    if name.endswith(".xz"):
        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise PartsError(f"the {len(parts)} parts of {name} in {folder} can't be unpacked: {error}") from error
    if not data.startswith(b"\x7fELF"):
        raise PartsError(f"the {len(parts)} parts of {name} in {folder} are no shared library")
    library = out / NAME
    library.write_bytes(data)
    return library


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["split", library, folder, *rest] if len(rest) <= 1:
                mib = int(rest[0]) if rest else DEFAULT_MIB
                if mib < 1:
                    raise PartsError(f"a part has 1 MiB or more, not {mib}")
                split(Path(library), Path(folder), mib * 2**20)
            case ["join", folder, out]:
                print(join(Path(folder), Path(out)))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (PartsError, OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
