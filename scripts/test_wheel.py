"""Installs a wheel into a new environment, away from the checkout, and trains two ranks with it: without numpy, with
one torch after the other in the same environment, then with one that the wheel does not cover.

`python -m scripts.test_wheel dist/torchddp-...whl --torches 2.13.0 2.14.1 --uncovered 2.12.1`. With `--torch-of PYTHON`
the packages of that interpreter are linked into the environment instead, because torch with CUDA is 5 GB.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.check_wheel import extensions

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tests" / "wheel" / "smoke.py"
STEP_TIMEOUT_S = 600
LAUNCH = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SMOKE))


class Environment:
    """A virtual environment, a working directory away from the checkout, and a home of its own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True, clear=True)
        self.bin = folder / "venv" / "bin"
        self.site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        self.cache = folder / "cache" / "torchddp"
        self._away = folder / "away"
        self._away.mkdir()

    def run(
        self, *command: str, expected: int = 0, silent: bool = False, with_stderr: bool = False, **variables: str
    ) -> str:
        """Runs a command of the environment and returns what it printed; exits on an unexpected exit code, or if it
        should be silent but printed warnings."""
        print(f"$ {' '.join(command)}", flush=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCHDDP_"))}
        env |= {"XDG_CACHE_HOME": str(self.cache.parent)} | variables
        program = str(self.bin / command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=self._away, env=env, capture_output=True, text=True, timeout=STEP_TIMEOUT_S
        )
        if done.returncode != expected:
            print(done.stdout + done.stderr)
            sys.exit(f"wheel: exit code {done.returncode} instead of {expected}")
        if silent and done.stderr.strip():
            sys.exit(f"wheel: warnings on stderr:\n{done.stderr}")
        return done.stdout + (done.stderr if with_stderr else "")

    def install(self, *requirements: str) -> None:
        began = time.monotonic()
        # The machine's constraints may leave out a torch that the wheel covers.
        self.run("python", "-m", "pip", "install", "-q", *requirements, PIP_CONSTRAINT=os.devnull)
        print(f"  {time.monotonic() - began:.0f} s")

    def link_packages(self, python: str, without: tuple[str, ...] = ()) -> None:
        """Links the other interpreter's site-packages, except torchddp and names starting with `without`."""
        code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parents[1])"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for path in Path(found).iterdir():
            left_out = path.name.startswith(("torchddp", "__editable__", *without)) or path.suffix == ".pth"
            if not left_out and path.name != "__pycache__" and not (self.site / path.name).exists():
                (self.site / path.name).symlink_to(path)

    def files(self) -> dict[Path, float]:
        """The package's and the user's extensions, and when they were written."""
        found = [*(self.site / "torchddp").glob("*.so"), *self.cache.rglob("*")]
        return {path: path.stat().st_mtime for path in found if path.is_file()}


def train(environment: Environment) -> None:
    """Trains on two ranks with only torch installed. Ignores only torch's own warning about missing numpy."""
    environment.run("python", "-c", "import importlib.util; assert importlib.util.find_spec('numpy') is None")
    began = time.monotonic()
    ignored = "ignore:Failed to initialize NumPy"
    print(environment.run(*LAUNCH, silent=True, PYTHONWARNINGS=ignored, OMP_NUM_THREADS="1"), end="")
    print(f"  {time.monotonic() - began:.0f} s")


def check(environment: Environment, version: str) -> None:
    """pip and the doctor find nothing wrong."""
    environment.run("python", "-m", "pip", "check")
    found = json.loads(environment.run("torchddp", "doctor", "--json"))
    if found["built"]["version"] != version.partition("+")[0]:
        sys.exit(f"wheel: doctor says {found['built']['version']}, the wheel is {version}")
    for name in ("c10d", "shm"):
        if not any(transport["name"] == name and transport["works"] for transport in found["transports"]):
            sys.exit(f"wheel: transport {name} does not work: {found['transports']}")
    print(environment.run("python", "-m", "torchddp", "doctor"), end="")


def check_uncovered(environment: Environment, torch: str) -> None:
    """One sentence says what to do, and doing it helps. Of two processes that do it at once, one compiles."""
    environment.install(f"torch=={torch}")
    environment.install("cmake", "ninja")
    said = environment.run("python", "-c", "import torchddp", expected=1, with_stderr=True).strip().splitlines()[-1]
    print(f"  {said}")
    if not re.fullmatch(
        r"ImportError: torch \S+ .*is running, and torchddp has extensions for .*`torchddp build`.*", said
    ):
        sys.exit("wheel: that is not the sentence")
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(environment.run, "torchddp", "build", with_stderr=True) for _ in range(2)]
    printed = sorted(one.result() for one in both)
    print(
        "".join(f"  {line}\n" for text in printed for line in text.splitlines()) + f"  {time.monotonic() - began:.0f} s"
    )
    if sum("waiting for another process" in text for text in printed) != 1:
        sys.exit("wheel: both have compiled")
    if [path.suffix for path in environment.cache.rglob("*") if path.is_file()] != [".so"]:
        sys.exit(f"wheel: more than an extension is left in {environment.cache}")
    train(environment)


def without(wheel: Path, torch: str, folder: Path) -> Path:
    """The wheel without its extensions for this torch: what a newer torch will find in it."""
    minor = ".".join(torch.split(".")[:2])
    other = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as copy:
        left_out = {name for name, (covered, _) in extensions(archive).items() if covered == minor}
        for info in archive.infolist():
            if info.filename not in left_out:
                data = archive.read(info)
                if info.filename.endswith(".dist-info/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if line.split(",")[0] not in left_out).encode()
                copy.writestr(info, data)
    return other


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torches", nargs="+", default=[], help="versions to install one after the other")
    parser.add_argument("--uncovered", help="a version whose extensions are left out, and which is compiled for")
    parser.add_argument("--torch-of", metavar="PYTHON", help="an interpreter whose packages to link")
    args = parser.parse_args(argv)
    if bool(args.torches) == bool(args.torch_of):
        parser.error("name either --torches or --torch-of")
    return args


def main() -> None:
    args = parse_args()
    wheel = args.wheel.resolve()
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="torchddp-wheel-") as folder:
        environment = Environment(Path(folder))
        if args.torch_of:
            environment.link_packages(args.torch_of, without=("numpy",))
        else:
            environment.install(f"torch=={args.torches[0]}")
        environment.install(str(wheel))
        installed = environment.files()
        train(environment)
        for torch in args.torches[1:]:
            environment.install(f"torch=={torch}")
            train(environment)
        if environment.files() != installed:
            sys.exit("wheel: something was compiled, or the installed extensions have changed")
        if args.uncovered:
            environment.install("--force-reinstall", "--no-deps", str(without(wheel, args.uncovered, Path(folder))))
            check_uncovered(environment, args.uncovered)
        if args.torch_of:
            environment.link_packages(args.torch_of)
        environment.install(f"{wheel}[cli]")
        check(environment, version)
    print(f"{wheel.name}: installed, trained with, removed")


if __name__ == "__main__":
    main()
