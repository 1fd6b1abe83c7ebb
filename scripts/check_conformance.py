"""Run torch's own DistributedDataParallel tests against ours.

`tests/conformance/torch_passes_ws<N>.json` lists the tests that torch's class passes on a CPU machine at world size N.
Ours must pass every one of them, through shared memory ("auto") and through the process group ("c10d"). The tests come
from the installed torch; `tests/conformance/harness.py` runs them.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "conformance"
WORLD_SIZES = (2, 3)
TRANSPORTS = ("auto", "c10d")
TIMEOUT_S = 400  # per test: a guard against hangs. Compiling takes up to 120 s at three ranks on a busy machine


@dataclass(frozen=True)
class Outcome:
    """The outcome of one world size over one transport."""

    expected: frozenset[str]
    passed: frozenset[str]
    reasons: dict[str, str]  # for tests that did not pass

    @property
    def missed(self) -> list[str]:
        return sorted(self.expected - self.passed)


def expected_path(world_size: int) -> Path:
    return FOLDER / f"torch_passes_ws{world_size}.json"


def expected_tests(world_size: int) -> frozenset[str]:
    return frozenset(json.loads(expected_path(world_size).read_text()))


def read_outcome(results_path: Path, expected: frozenset[str]) -> Outcome:
    results = json.loads(results_path.read_text())["results"]
    passed = frozenset(name for name, result in results.items() if result["status"] == "pass")
    reasons = {
        name: f"{result['status']}: {result.get('reason', '')}"
        for name, result in results.items()
        if name not in passed
    }
    return Outcome(expected, passed, reasons)


def run_harness(world_size: int, transport: str, args: argparse.Namespace) -> Path:
    """Run the harness and return the path of its results; its output goes to a log next to them."""
    out_dir = ROOT / "build" / "conformance" / f"ws{world_size}-{transport}"
    out_dir.mkdir(parents=True, exist_ok=True)
    results_path = out_dir / "results.json"
    results_path.unlink(missing_ok=True)
    command = [sys.executable, str(FOLDER / "harness.py"), "--ddp", args.ddp]
    command += ["--keys", str(expected_path(world_size))]
    command += ["--world-size", str(world_size), "--jobs", str(args.jobs), "--out", str(results_path)]
    command += ["--timeout", str(TIMEOUT_S)]
    command += ["--logs", str(out_dir / "logs"), "--tmp", str(out_dir / "tmp"), "--pythonpath", str(ROOT)]
    if args.only:
        command += ["--only", args.only]
    log_path = out_dir / "harness.log"
    with log_path.open("w") as log:
        # The runs compile the same code: each takes what another has compiled.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(out_dir.parent / "compiled")}
        env = os.environ | {"TORCHDDP_TRANSPORT": transport} | compiled
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
    if done.returncode or not results_path.exists() or not json.loads(results_path.read_text())["results"]:
        tail = "\n".join(log_path.read_text().splitlines()[-20:])
        raise SystemExit(f"conformance: the harness failed at world size {world_size}, see {log_path}:\n{tail}")
    return results_path


def check(world_size: int, transport: str, args: argparse.Namespace) -> bool:
    """Run and report one combination; returns whether every expected test passed."""
    outcome = read_outcome(run_harness(world_size, transport, args), expected_tests(world_size))
    if args.only:
        outcome = Outcome(outcome.expected & (outcome.passed | outcome.reasons.keys()), outcome.passed, outcome.reasons)
    count = f"{len(outcome.expected) - len(outcome.missed)} of {len(outcome.expected)}"
    print(f"world size {world_size}, transport {transport}: {count} that torch's own class passes", flush=True)
    for name in outcome.missed:
        print(f"  missed {name} | {outcome.reasons.get(name, 'did not run')[:200]}")
    return not outcome.missed


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=list(WORLD_SIZES), choices=WORLD_SIZES)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--jobs", type=int, default=2, help="tests to run in parallel")
    parser.add_argument("--only", help="regular expression: run only these tests")
    parser.add_argument("--ddp", default="torchddp.DistributedDataParallel", help="the class to test")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    # Two runs at a time: most tests spend half of their time waiting, and only a few take as long as 40 s.
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(check, size, transport, args) for size in args.world_sizes for transport in args.transports]
    if not all([run.result() for run in runs]):
        raise SystemExit("conformance: some tests that torch's own class passes failed, see 'missed' above")


if __name__ == "__main__":
    main()
