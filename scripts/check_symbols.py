"""Fails if an extension needs a symbol that none of its linked libraries defines, such as one of the CUDA runtime.

This is the check of `ld -z defs`, which extensions can't use because Python's symbols come from the program. Importing
the extension is not enough, because symbols of libraries that others happened to load would count too.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PYTHON_SYMBOL = re.compile(r"^_?Py[A-Z_]")


def symbols(nm_output: str) -> dict[str, str]:
    """Kind by name, from `nm -D`: U is undefined, w and v are weak, other letters are defined.

    Names include their version if they have one: cudaMalloc@libcudart.so.13.
    """
    found = {}
    for line in nm_output.splitlines():
        *_, kind, name = line.split()
        found[name.replace("@@", "@")] = kind  # @@ marks the default version
    return found


def missing_symbols(needed: dict[str, str], defined: set[str]) -> list[str]:
    """The symbols that the loader would not find: a version may be missing only in a library without versions."""
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
    """Symbols that `extension` needs but that neither this interpreter's packages nor the system's libraries define."""
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
    print(f"{extension.name}: all needed symbols are defined by its linked libraries or Python")


if __name__ == "__main__":
    main()
