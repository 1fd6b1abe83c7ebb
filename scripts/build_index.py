"""Writes package indexes for pip: one per torch and CUDA version, because pip can't tell those apart.

    OUT/index.html                              the available wheels, for people
    OUT/torch-2.13/cu130/                       pip's index: --index-url .../torch-2.13/cu130/
    OUT/torch-2.13/cu130/torchddp/index.html    the wheels, with checksums and Python versions
    OUT/wheels/                                 copies of all wheels

Any web server can serve OUT as it is; pip can also read it from a folder.

Examples:
  python -m scripts.build_index dist --out build/index
  pip install --no-deps torchddp --index-url file://$PWD/build/index/torch-2.13/cpu/
  python -m scripts.build_index dist --out site --url https://example.org/torchddp
"""

import argparse
import email
import hashlib
import re
import shutil
import sys
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

WHEEL_NAME = re.compile(
    r"torchddp-(?P<version>[0-9][^-+]*\+(?P<variant>cpu|cu\d+)\.torch(?P<torch>\d+\.\d+))"
    r"-cp(?P<python>\d+)-\w+-(?P<platform>\w+)\.whl"
)
PAGE = """<!DOCTYPE html>
<html>
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Wheel:
    path: Path
    version: str  # 0.1.0+cu130.torch2.13
    torch: str  # 2.13
    variant: str  # cu130
    python: str  # 3.11
    platform: str  # manylinux_2_28_x86_64
    requires_python: str  # >=3.10

    @property
    def folder(self) -> str:
        """The folder of its index."""
        return f"torch-{self.torch}/{self.variant}"


def read_wheel(path: Path) -> Wheel:
    """Reads a wheel's metadata. ValueError if it is not a torchddp wheel."""
    name = WHEEL_NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(
            f"{path} is not a torchddp wheel: its name must be like "
            "torchddp-0.1.0+cu130.torch2.13-cp311-cp311-manylinux_2_28_x86_64.whl, as made by scripts/build_wheel.py"
        )
    metadata_name = f"torchddp-{name['version']}.dist-info/METADATA"
    try:
        with zipfile.ZipFile(path) as archive:
            metadata = email.message_from_bytes(archive.read(metadata_name))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is not a wheel: it is unreadable or has no {metadata_name} ({error})") from error
    if metadata["Version"] != name["version"]:
        raise ValueError(f"the metadata of {path} says version {metadata['Version']}; build it again")
    python = f"{name['python'][0]}.{name['python'][1:]}"
    requires_python = str(metadata["Requires-Python"] or "")
    return Wheel(path, name["version"], name["torch"], name["variant"], python, name["platform"], requires_python)


def read_wheels(folder: Path) -> list[Wheel]:
    """All wheels under `folder`, newest torch first. ValueError for no wheels, other files, or duplicate names."""
    wheels = [read_wheel(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    if not wheels:
        raise ValueError(f"there are no wheels in {folder}; build some with: make wheel")
    first: dict[str, Path] = {}
    for wheel in wheels:
        if (other := first.setdefault(wheel.path.name, wheel.path)) != wheel.path:
            raise ValueError(f"{other} and {wheel.path} have the same name; remove one of them")
    return sorted(wheels, key=order)


def order(wheel: Wheel) -> tuple[tuple[int, ...], str, str, tuple[int, ...], str]:
    torch, python = ([int(number) for number in text.split(".")] for text in (wheel.torch, wheel.python))
    return tuple(-number for number in torch), wheel.variant, wheel.version, tuple(python), wheel.platform


# --- pages ---


def link(wheel: Wheel) -> str:
    """The link that pip reads, relative to the wheel's page."""
    checksum = hashlib.sha256(wheel.path.read_bytes()).hexdigest()
    python = f' data-requires-python="{escape(wheel.requires_python)}"' if wheel.requires_python else ""
    target = f"../../../wheels/{quote(wheel.path.name)}#sha256={checksum}"
    return f'<a href="{target}"{python}>{escape(wheel.path.name)}</a><br>'


def front_page(wheels: Sequence[Wheel], url: str) -> str:
    """The page for people: a row per version, torch and CUDA."""
    rows = defaultdict(list)
    for wheel in wheels:
        rows[wheel.version, wheel.folder].append(wheel)
    lines = [
        "<p>Find your version of torch: <code>python -c "
        '"import torch; print(torch.__version__, torch.version.cuda)"</code></p>',
        "<table border=1>",
        "<tr><th>torch</th><th>CUDA</th><th>Python</th><th>platforms</th><th>command</th></tr>",
    ]
    for (version, folder), found in rows.items():
        of_cuda = re.fullmatch(r"cu(\d+)(\d)", found[0].variant)
        cells = [
            f'<a href="{folder}/torchddp/index.html">{found[0].torch}</a>',
            f"{of_cuda[1]}.{of_cuda[2]}" if of_cuda else "none (CPU)",
            ", ".join(dict.fromkeys(wheel.python for wheel in found)),
            ", ".join(dict.fromkeys(wheel.platform for wheel in found)),
            f"<code>pip install --no-deps torchddp=={version} --index-url {escape(url)}/{folder}/</code>",
        ]
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return PAGE.format(title="torchddp wheels", body="\n".join([*lines, "</table>"]))


def write_index(wheels: Sequence[Wheel], out: Path, url: str) -> None:
    """Writes the index. `out` must be empty or not exist; `url`: its future address, for the front page's commands."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be an empty folder, or not exist")
    (out / "wheels").mkdir(parents=True)
    links = defaultdict(list)
    for wheel in wheels:
        shutil.copyfile(wheel.path, out / "wheels" / wheel.path.name)
        links[wheel.folder].append(link(wheel))
    for folder, lines in links.items():
        (out / folder / "torchddp").mkdir(parents=True)
        (out / folder / "torchddp" / "index.html").write_text(PAGE.format(title="torchddp", body="\n".join(lines)))
        (out / folder / "index.html").write_text(
            PAGE.format(title=folder, body='<a href="torchddp/index.html">torchddp</a>')
        )
    (out / "index.html").write_text(front_page(wheels, url.rstrip("/")))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="a folder with only torchddp wheels, also in subfolders")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty or not exist")
    parser.add_argument("--url", default="", help="the future address of OUT, for the front page (default: the folder)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        wheels = read_wheels(args.wheels)
        write_index(wheels, args.out, args.url or args.out.absolute().as_uri())
    except ValueError as error:
        sys.exit(f"index: {error}")
    indexes = list(dict.fromkeys(wheel.folder for wheel in wheels))
    print(f"{args.out}: wheels {len(wheels)}, indexes {', '.join(indexes)}")


if __name__ == "__main__":
    main()
