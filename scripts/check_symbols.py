"""Fails if an extension needs a symbol that none of the libraries it names has, such as torch's CUDA runtime.

What `ld -z defs` checks, which an extension can't be linked with: Python's symbols come from the program. Importing the
extension is no such check, for there whatever another library happened to load counts too.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PYTHON_SYMBOL = re.compile(r"^_?Py[A-Z_]")


def symbols(nm_output: str) -> dict[str, str]:
    """Kind by name, from `nm -D`: U is needed, w and v are needed if they are there, other letters are defined.

    A name has its version if there is one: cudaMalloc@libcudart.so.13.
    """
    found = {}
    for line in nm_output.splitlines():
        *_, kind, name = line.split()
        found[name.replace("@@", "@")] = kind  # @@ is the version for those who ask for none
    return found


def missing_symbols(needed: dict[str, str], defined: set[str]) -> list[str]:
    """What the loader would not find: a version may be missing only in a library that has none."""
    plain = {name.partition("@")[0] for name in defined}

    def is_there(name: str) -> bool:
        base, _, version = name.partition("@")
        return name in defined or base in (defined if version else plain)

    return sorted(
        name for name, kind in needed.items() if kind == "U" and not is_there(name) and not PYTHON_SYMBOL.match(name)
    )


def nm(path: Path, option: str) -> dict[str, str]:
    return symbols(subprocess.run(["nm", "-D", option, str(path)], capture_output=True, text=True, check=True).stdout)


def needed_libraries(extension: Path) -> list[str]:
    dynamic = subprocess.run(["readelf", "-dW", str(extension)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)


def library_path(name: str, folders: list[Path]) -> Path:
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    found = subprocess.run(
        ["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if found == name:
        sys.exit(f"the extension needs {name}, which is not in {', '.join(map(str, folders))} or the system")
    return Path(found)


def library_folders() -> list[Path]:
    """torch's and NVIDIA's libraries among this interpreter's packages."""
    sites = [Path(folder) for folder in sys.path if folder]
    found = [path for site in sites for pattern in ("torch/lib", "nvidia/*/lib") for path in sorted(site.glob(pattern))]
    return [path for path in found if path.is_dir()]


def symbol_problems(extension: Path) -> list[str]:
    """What `extension` needs and does not find among this interpreter's packages and the system's libraries."""
    folders, libraries = library_folders(), needed_libraries(extension)
    defined: set[str] = set()
    for library in libraries:
        defined |= nm(library_path(library, folders), "--defined-only").keys()
    missing = missing_symbols(nm(extension, "--undefined-only"), defined)
    return [f"symbol {name} is in none of {', '.join(libraries)}" for name in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extension", type=Path)
    extension = parser.parse_args().extension
    if problems := symbol_problems(extension):
        sys.exit("\n".join(f"{extension.name}: {problem}" for problem in problems))
    print(f"{extension.name}: all symbols that it needs are in the libraries that it names, or Python's")


if __name__ == "__main__":
    main()
