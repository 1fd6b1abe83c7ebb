"""Runs torch's own DistributedDataParallel tests against ours and guards the list of those that pass.

Each world size has a committed list, tests/conformance/passing_ws<N>.json: every test in it must still pass. `--update`
adds what passes now and never takes anything away. Each runs through shared memory ("auto") and through the process
group ("c10d"). The harness and its baselines (what torch's own class passes on such
a machine) lie beside the project, in ../shared/conformance; without them there is nothing to run.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS_DIR = ROOT / "tests" / "conformance"
BASELINES = {2: "baseline_torch.json", 3: "baseline_torch_ws3.json"}
TRANSPORTS = ("auto", "c10d")
# Times out with torch's own class on gloo.
SKIP = "test_ddp_has_finalized"
# Seconds a test. At three ranks on a slow machine the longest takes the 60 that the harness allows by itself.
TIMEOUT_S = 120


@dataclass(frozen=True)
class Outcome:
    """One world size: what was expected, and what a run gave."""

    world_size: int
    baseline: frozenset[str]  # passes with torch's own class
    listed: frozenset[str]  # committed: must pass
    passed: frozenset[str]
    reasons: dict[str, str]  # of those that did not pass

    @property
    def conforming(self) -> frozenset[str]:
        return self.passed & self.baseline

    @property
    def lost(self) -> list[str]:
        return sorted(self.listed - self.passed)

    @property
    def gained(self) -> list[str]:
        return sorted(self.conforming - self.listed)

    @property
    def missed(self) -> list[str]:
        return sorted(self.baseline - self.passed)


def list_path(world_size: int, lists_dir: Path = LISTS_DIR) -> Path:
    return lists_dir / f"passing_ws{world_size}.json"


def read_list(path: Path) -> frozenset[str]:
    return frozenset(json.loads(path.read_text())) if path.exists() else frozenset()


def read_outcome(world_size: int, results_path: Path, baseline_path: Path, listed: frozenset[str]) -> Outcome:
    results = json.loads(results_path.read_text())["results"]
    baseline = json.loads(baseline_path.read_text())["results"]
    return Outcome(
        world_size=world_size,
        baseline=frozenset(name for name, result in baseline.items() if result["status"] == "pass"),
        listed=listed,
        passed=frozenset(name for name, result in results.items() if result["status"] == "pass"),
        reasons={
            name: f"{result['status']}: {result.get('reason', '')}"
            for name, result in results.items()
            if result["status"] != "pass"
        },
    )


def run_harness(harness_dir: Path, world_size: int, transport: str, args: argparse.Namespace) -> Path:
    """Runs the harness and returns the path of its results; the run's own output goes to a log beside them."""
    out_dir = ROOT / "build" / "conformance" / f"ws{world_size}-{transport}"
    out_dir.mkdir(parents=True, exist_ok=True)
    results_path = out_dir / "results.json"
    results_path.unlink(missing_ok=True)
    command = [sys.executable, str(harness_dir / "harness.py"), "--ddp", args.ddp, "--run-disabled", "--skip", SKIP]
    command += ["--world-size", str(world_size), "--jobs", str(args.jobs), "--out", str(results_path)]
    command += ["--timeout", str(TIMEOUT_S)]
    command += ["--logs", str(out_dir / "logs"), "--tmp", str(out_dir / "tmp"), "--pythonpath", str(ROOT)]
    if args.only:
        command += ["--only", args.only]
    log_path = out_dir / "harness.log"
    # The harness lies in a folder that may not be writable.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "TORCHDDP_TRANSPORT": transport}
    with log_path.open("w") as log:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
    if done.returncode or not results_path.exists() or not json.loads(results_path.read_text())["results"]:
        tail = "\n".join(log_path.read_text().splitlines()[-20:])
        raise SystemExit(f"conformance: the harness failed at world size {world_size}, see {log_path}:\n{tail}")
    return results_path


def report(outcome: Outcome, transport: str) -> None:
    count = f"{len(outcome.conforming)} of {len(outcome.baseline)} that torch's own class passes"
    print(f"world size {outcome.world_size}, transport {transport}: {count}")
    for name in outcome.missed:
        mark = "LOST  " if name in outcome.listed else "missed"
        print(f"  {mark} {name} | {outcome.reasons.get(name, 'did not run')[:200]}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3], choices=sorted(BASELINES))
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at the same time")
    parser.add_argument("--update", action="store_true", help="add the tests that pass now to the committed lists")
    parser.add_argument("--only", help="regular expression: run these tests only, and judge only these")
    parser.add_argument("--ddp", default="torchddp.DistributedDataParallel", help="the class to test")
    parser.add_argument("--harness-dir", type=Path, default=ROOT.parent / "shared" / "conformance")
    return parser.parse_args(argv)


def check_world_size(world_size: int, transport: str, args: argparse.Namespace) -> bool:
    """Runs one world size, reports it, updates its list if asked to; False if a listed test was lost."""
    path = list_path(world_size)
    if not path.exists() and not args.update:
        raise SystemExit(f"conformance: {path.relative_to(ROOT)} is missing; make it with --update")
    listed = read_list(path)
    results_path = run_harness(args.harness_dir, world_size, transport, args)
    outcome = read_outcome(world_size, results_path, args.harness_dir / BASELINES[world_size], listed)
    if args.only:
        ran = outcome.passed | outcome.reasons.keys()
        outcome = Outcome(world_size, outcome.baseline & ran, listed & ran, outcome.passed, outcome.reasons)
    report(outcome, transport)
    if args.update and outcome.gained:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sorted(listed | outcome.conforming), indent=1) + "\n")
        print(f"  added {len(outcome.gained)} to {path.relative_to(ROOT)}")
    elif outcome.gained:
        print(f"  {len(outcome.gained)} more than listed pass: add them with --update")
    return not outcome.lost


def main() -> None:
    args = parse_args()
    if not (args.harness_dir / "harness.py").exists():
        print(f"conformance: skipped, there is no harness in {args.harness_dir}")
        return
    runs = [(world_size, transport) for world_size in args.world_sizes for transport in args.transports]
    kept = [check_world_size(world_size, transport, args) for world_size, transport in runs]
    if not all(kept):
        raise SystemExit("conformance: tests that passed before do not pass any more (LOST above)")


if __name__ == "__main__":
    main()
