"""Writes the exact versions of everything that an environment of the Makefile installs: requirements/GROUP.txt.

pyproject.toml's dependency groups name what the project uses itself; pip chooses here, once, what those packages need.
The files are constraints (`pip install --group dev -c requirements/dev.txt`), without addresses, so any index serves.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
# The groups that the Makefile installs an environment from; the others are parts of these.
ENVIRONMENTS = (
    *("dev", "docs", "wheel", "cuda", "dry", "peers", "ft", "ft-nightly"),
    *("lightning", "accelerate", "composer", "engines", "trl", "ray", "spark"),
)
HEADER = "# Written by `make lock` (python -m scripts.lock {group}).\n"


def resolve(group: str) -> dict[str, str]:
    """By package's name, the version that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    # Some packages of peers import torch in their setup.
    command += ["--no-build-isolation", "--report", "-", "--group", group]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"lock: pip found no versions for the group '{group}'; see above.")
    found = (item["metadata"] for item in json.loads(result.stdout)["install"])
    # Local versions (+cpu) say where a package was built.
    return {package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"default: all ({', '.join(ENVIRONMENTS)})")
    args = parser.parse_args()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    if wrong := [group for group in args.groups if group not in known]:
        parser.error(f"no dependency group '{wrong[0]}' in pyproject.toml")
    FOLDER.mkdir(exist_ok=True)
    for group in args.groups or ENVIRONMENTS:
        versions = resolve(group)
        lines = [f"{name}=={versions[name]}\n" for name in sorted(versions)]
        (FOLDER / f"{group}.txt").write_text(HEADER.format(group=group) + "".join(lines))
        print(f"requirements/{group}.txt: {len(versions)} packages", flush=True)


if __name__ == "__main__":
    main()
