"""Installs a wheel from an index into a new environment, away from the checkout, and uses it there: first with only
torch, without numpy, then with the extra `cli`.

`python -m scripts.test_wheel dist/torchddp-...whl --torch torch==2.13.0` installs torch as well; with `--torch-of
PYTHON` the packages of that interpreter are linked into the new environment instead, because torch with CUDA is 5 GB.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from scripts.build_index import read_wheel, write_index

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tests" / "wheel" / "smoke.py"
STEP_TIMEOUT_S = 240


class Environment:
    """A virtual environment, and a working directory away from the checkout."""

    def __init__(self, folder: Path, away: Path) -> None:
        venv.create(folder, with_pip=True, clear=True)
        self.bin = folder / "bin"
        self.site = next((folder / "lib").glob("python*")) / "site-packages"
        self._away = away

    def run(self, *command: str, expected: int = 0, silent: bool = False, **variables: str) -> str:
        """Runs a command of the environment and returns its output; exits on an unexpected exit code, or if it should
        be silent but printed warnings."""
        print(f"$ {' '.join(command)}", flush=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCHDDP_"))}
        env |= variables
        program = str(self.bin / command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=self._away, env=env, capture_output=True, text=True, timeout=STEP_TIMEOUT_S
        )
        if done.returncode != expected:
            print(done.stdout + done.stderr)
            sys.exit(f"wheel: exit code {done.returncode} instead of {expected}")
        if silent and done.stderr.strip():
            sys.exit(f"wheel: warnings on stderr:\n{done.stderr}")
        return done.stdout


def link_packages(environment: Environment, python: str, without: tuple[str, ...] = ()) -> None:
    """Links the other interpreter's site-packages, except torchddp and names starting with `without`."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parents[1])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    for path in Path(found).iterdir():
        left_out = path.name.startswith(("torchddp", "__editable__", *without)) or path.suffix == ".pth"
        if not left_out and path.name != "__pycache__" and not (environment.site / path.name).exists():
            (environment.site / path.name).symlink_to(path)


def pretend_other_torch(environment: Environment) -> None:
    """Makes pip believe that torch 2.1.0 is installed."""
    (found,) = [path for path in environment.site.glob("torch-*.dist-info")]
    other = environment.site / "torch-2.1.0.dist-info"
    version = importlib.metadata.Distribution.at(found).version
    shutil.copytree(found, other)
    text = (other / "METADATA").read_text().replace(f"\nVersion: {version}\n", "\nVersion: 2.1.0\n")
    (other / "METADATA").write_text(text)
    found.unlink() if found.is_symlink() else shutil.rmtree(found)


def train(environment: Environment) -> None:
    """Trains on two ranks with only torch installed. Ignores only torch's own warning about missing numpy."""
    environment.run("python", "-c", "import importlib.util; assert importlib.util.find_spec('numpy') is None")
    launch = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SMOKE))
    ignored = "ignore:Failed to initialize NumPy"
    print(environment.run(*launch, silent=True, PYTHONWARNINGS=ignored, OMP_NUM_THREADS="1"), end="")


def check(environment: Environment, wheel: Path) -> None:
    environment.run("python", "-m", "pip", "check")
    found = json.loads(environment.run("torchddp", "doctor", "--json"))
    version = wheel.name.split("-")[1]
    if found["built"]["version"] != version:
        sys.exit(f"wheel: doctor says {found['built']['version']}, the wheel is {version}")
    for name in ("c10d", "shm"):
        if not any(transport["name"] == name and transport["works"] for transport in found["transports"]):
            sys.exit(f"wheel: transport {name} does not work: {found['transports']}")
    print(environment.run("python", "-m", "torchddp", "doctor"), end="")
    pretend_other_torch(environment)
    refusal = environment.run("python", "-m", "pip", "check", expected=1)
    if f"torchddp {version} has requirement torch==" not in refusal:
        sys.exit(f"wheel: the output of pip check does not have the requirement: {refusal}")
    print("pip refuses it with another torch")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--torch", help="the requirement to install first, e.g. torch==2.13.0")
    source.add_argument("--torch-of", metavar="PYTHON", help="an interpreter whose packages to link")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    wheel = args.wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="torchddp-wheel-") as folder:
        away = Path(folder) / "away"
        away.mkdir()
        environment = Environment(Path(folder) / "venv", away)
        if args.torch:
            environment.run("python", "-m", "pip", "install", "-q", args.torch)
        else:
            link_packages(environment, args.torch_of, without=("numpy",))
        found = read_wheel(wheel)
        index = Path(folder) / "index"
        write_index([found], index, index.as_uri())
        # In addition to PyPI, which has the extra's requirements.
        pages = ["--extra-index-url", f"{index.as_uri()}/{found.folder}/"]
        environment.run("python", "-m", "pip", "install", "-q", *pages, f"torchddp=={found.version}")
        train(environment)
        if args.torch_of:
            link_packages(environment, args.torch_of)
        environment.run("python", "-m", "pip", "install", "-q", *pages, f"torchddp[cli]=={found.version}")
        check(environment, wheel)
    print(f"{wheel.name}: installed, trained with, removed")


if __name__ == "__main__":
    main()
