#!/usr/bin/env python3
"""Run PyTorch's own DistributedDataParallel tests against any class with the same API.

  harness.py --ddp torchddp.DistributedDataParallel --keys torch_passes_ws2.json --out r.json

The tests come from the installed torch (torch.testing._internal.distributed.distributed_test); none is copied
here.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import unittest
from pathlib import Path

GRACE_S = 45  # extra time for a test to end by itself after its timeout


def run_one(cls, name, timeout_s):
    result = unittest.TestResult()
    began = time.time()
    try:
        unittest.TestSuite([cls(name)]).run(result)
    except BaseException as error:
        result.errors.append((None, f"{type(error).__name__}: {error}"))
    seconds = time.time() - began
    for process in multiprocessing.active_children():
        process.kill()
        process.join(5)
    bad = result.failures + result.errors + [(test, "unexpected success") for test in result.unexpectedSuccesses]
    if bad:
        message = "\n".join(text for _, text in bad)
        late = seconds >= timeout_s and re.search("timed out|exit code|rank died", message)
        status = "timeout" if late else "fail"
    elif result.skipped or result.testsRun == 0:
        status, message = "skip", result.skipped[0][1] if result.skipped else "did not run"
    else:
        status, message = "pass", ""
    return status, message, seconds


class Running:
    """A test in its own process, which takes all leftovers with it."""

    def __init__(self, cls, key, args):
        self.key, self.began = key, time.time()
        self.last = self.began + args.timeout + GRACE_S
        self.found = Path(args.logs, f"{key}.json")
        self.found.unlink(missing_ok=True)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            log = os.open(os.path.join(args.logs, f"{key}.log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            self.found.write_text(json.dumps(run_one(cls, key.rpartition(".")[2], args.timeout)))
            sys.stdout.flush()
            os._exit(0)

    def result(self):
        """Status, message and seconds, or None while it runs."""
        ended, wait_status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.time() - self.began
        if ended:
            if self.found.exists():
                return json.loads(self.found.read_text())
            return "fail", f"harness: test process died, wait status {wait_status}", seconds
        if time.time() < self.last:
            return None
        os.killpg(self.pid, signal.SIGKILL)  # the test has its own session: kills only what it started
        os.waitpid(self.pid, 0)
        return "timeout", "harness: hard limit", seconds


def first_error(message):
    """The line of the error, for the summary."""
    found = re.findall(r"^(\w[\w.]*(?:Error|Exception|Failure|Timeout)\b.*)$", message, re.M)
    inner = [line for line in found if not line.startswith("RuntimeError: Process ")]
    return ((inner or found)[:1] or message.strip().splitlines()[-1:] or [""])[0][:400]


def run(cls, keys, args):
    results, running, queue = {}, [], list(keys)
    while queue or running:
        while queue and len(running) < args.jobs:
            running.append(Running(cls, queue.pop(0), args))
        time.sleep(0.05)
        for test in list(running):
            got = test.result()
            if got is None:
                continue
            running.remove(test)
            status, message, seconds = got
            result = {"status": status, "seconds": round(seconds, 2)}
            if message:
                result |= {"reason": first_error(message), "message": message[-3000:]}
            results[test.key] = result
            reason = f"  | {result['reason'][:140]}" if message else ""
            print(f"{len(results):4d}/{len(keys)} {status:8s} {seconds:6.1f}s {test.key}{reason}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", default="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--out", default="results.json")
    parser.add_argument("--keys", help="JSON list of the Class.test names to run; all if it is not given")
    parser.add_argument("--only", default="", help="regex on Class.test names")
    parser.add_argument("--timeout", type=float, default=60, help="seconds per test")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--pythonpath", default=os.getcwd(), help="where the class under test lives")
    parser.add_argument("--logs", default=os.path.join(os.getcwd(), "conf_logs"))
    parser.add_argument("--tmp", default=os.path.join(os.getcwd(), "conf_tmp"))
    args = parser.parse_args()
    for folder in (args.logs, args.tmp):
        os.makedirs(folder, exist_ok=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    network = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "BACKEND": "gloo"}
    os.environ.update(threads | network, WORLD_SIZE=str(args.world_size), TMPDIR=args.tmp)
    sys.path.insert(0, args.pythonpath)
    import conf_boot  # after setting the environment variables that torch reads

    cls = conf_boot.load(args.ddp, args.timeout)
    gc.freeze()  # the collector would copy the memory that forked ranks share
    keys = [f"{cls.__name__}.{name}" for name in unittest.TestLoader().getTestCaseNames(cls)]
    if args.keys:
        wanted = set(json.loads(Path(args.keys).read_text()))
        keys = [key for key in keys if key in wanted]
    results = run(cls, [key for key in keys if re.search(args.only, key)], args)
    Path(args.out).write_text(json.dumps({"results": results}, indent=1))


if __name__ == "__main__":
    main()
