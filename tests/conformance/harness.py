#!/usr/bin/env python3
"""Run PyTorch's own DistributedDataParallel tests against any class with the same API.

  harness.py --ddp torchddp.DistributedDataParallel --keys torch_passes_ws2.json --out r.json

The tests come from the installed torch (torch.testing._internal.distributed.distributed_test); nothing of them is kept
here.
"""

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

if __name__ == "__mp_main__":  # a spawned rank: same swap and shim as in the parent, before anything else
    import conf_boot

    conf_boot.bootstrap()


# ------------------------------------------------------------------------------- worker
def run_one(cls, name):
    import multiprocessing
    import unittest

    res = unittest.TestResult()
    t0 = time.time()
    try:
        unittest.TestSuite([cls(name)]).run(res)
    except BaseException as e:  # noqa: BLE001
        res.errors.append((None, f"{type(e).__name__}: {e}"))
    dt = time.time() - t0
    for p in multiprocessing.active_children():
        p.kill()
        p.join(5)
    bad = res.failures + res.errors + [(t, "unexpected success") for t in res.unexpectedSuccesses]
    if bad:
        msg = "\n".join(m for _, m in bad)
        late = dt >= float(os.environ["CONF_TIMEOUT"])
        status = "timeout" if late and re.search("timed out|exit code|rank died", msg) else "fail"
    elif res.skipped:
        status, msg = "skip", res.skipped[0][1]
    elif res.testsRun == 0:
        status, msg = "skip", "did not run"
    else:
        status, msg = "pass", ""
    return status, msg, dt


def worker():
    import unittest

    out = os.fdopen(int(os.environ["CONF_FD"]), "w", buffering=1)

    def say(o):
        out.write(json.dumps(o) + "\n")

    try:
        from conf_cases import WheelDistTest as cls
    except Exception:
        import traceback

        say({"error": traceback.format_exc()})
        return
    say({"tests": [f"{cls.__name__}.{n}" for n in unittest.TestLoader().getTestCaseNames(cls)]})
    for line in sys.stdin:
        key, log = json.loads(line)
        fd = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        # one process per test: whatever a test leaves behind goes with it
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(r)
            got = run_one(cls, key.rpartition(".")[2])
            with os.fdopen(w, "w") as f:
                json.dump(got, f)
            sys.stdout.flush()
            os._exit(0)
        os.close(w)
        with os.fdopen(r) as f:
            text = f.read()
        _, st = os.waitpid(pid, 0)
        try:
            status, msg, dt = json.loads(text)
        except ValueError:
            status, msg, dt = "fail", f"harness: test process died, wait status {st}", 0.0
        say({"key": key, "status": status, "seconds": round(dt, 2), "message": msg})


# ------------------------------------------------------------------------------- scheduler
class Worker:
    def __init__(self, a):
        r, w = os.pipe()
        env = dict(
            os.environ,
            CONF_FD=str(w),
            CONF_DDP=a.ddp,
            CONF_TIMEOUT=str(a.timeout),
            WORLD_SIZE=str(a.world_size),
            BACKEND="gloo",
            CONF_RUN_DISABLED="1" if a.run_disabled else "0",
            OMP_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1",
            GLOO_SOCKET_IFNAME="lo",
            TMPDIR=a.tmp,
            PYTHONPATH=os.pathsep.join([HERE] + a.pythonpath + [p for p in [os.environ.get("PYTHONPATH")] if p]),
        )
        self.err = open(os.path.join(a.logs, f"worker{os.getpid()}.log"), "ab")
        self.p = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "harness.py"), "--worker"],
            stdin=subprocess.PIPE,
            stdout=self.err,
            stderr=self.err,
            pass_fds=(w,),
            env=env,
            start_new_session=True,
            text=True,
        )
        os.close(w)
        self.r, self.buf, self.key, self.t0 = r, b"", None, 0.0
        self.hello = self.read(240)

    def read(self, timeout):
        end = time.time() + timeout
        while b"\n" not in self.buf:
            left = end - time.time()
            if left <= 0:
                return None
            if select.select([self.r], [], [], left)[0]:
                b = os.read(self.r, 65536)
                if not b:
                    return {"dead": True}
                self.buf += b
        line, _, self.buf = self.buf.partition(b"\n")
        return json.loads(line)

    def send(self, key, log):
        self.key, self.t0 = key, time.time()
        self.p.stdin.write(json.dumps([key, log]) + "\n")
        self.p.stdin.flush()

    def kill(self):
        try:
            os.killpg(self.p.pid, signal.SIGKILL)  # its own session: only what this worker started
        except ProcessLookupError:
            pass
        self.p.wait()
        os.close(self.r)


def first_error(msg):
    """The line that says what went wrong, for the summary."""
    m = re.findall(r"^(\w[\w.]*(?:Error|Exception|Failure|Timeout)\b.*)$", msg, re.M)
    inner = [x for x in m if not x.startswith("RuntimeError: Process ")]
    return ((inner or m)[:1] or msg.strip().splitlines()[-1:] or [""])[0][:400]


def run(a):
    os.makedirs(a.logs, exist_ok=True)
    os.makedirs(a.tmp, exist_ok=True)
    w = Worker(a)
    if "tests" not in (w.hello or {}):
        w.kill()
        sys.exit(f"cannot load the tests: {(w.hello or {}).get('error', 'worker did not start')}")
    todo = w.hello["tests"]
    if a.keys:
        todo = [k for k in todo if k in set(json.load(open(a.keys)))]
    if a.only:
        todo = [k for k in todo if re.search(a.only, k)]
    res, workers, queue = {}, [w], list(todo)
    while len(workers) < min(a.jobs, len(todo)):
        workers.append(Worker(a))
    while queue or any(x.key for x in workers):
        for x in workers:
            if x.key is None and queue:
                k = queue.pop(0)
                x.send(k, os.path.join(a.logs, k + ".log"))
        for i, x in enumerate(workers):
            if x.key is None:
                continue
            got = x.read(0.2 if len(workers) > 1 else 5)
            seconds = round(time.time() - x.t0, 1)
            if got is None and seconds < a.timeout + 45:
                continue
            key, x.key = x.key, None
            if got is None or got.get("dead"):
                status, what = ("timeout", "hard limit") if got is None else ("fail", "worker died")
                got = {"status": status, "seconds": seconds, "message": f"harness: {what}"}
                x.kill()
                workers[i] = Worker(a)
            r = {"status": got["status"], "seconds": got["seconds"]}
            if got["message"]:
                r["reason"] = first_error(got["message"])
                if got["status"] != "skip":
                    r["message"] = got["message"][-3000:]
            res[key] = r
            print(
                f"{len(res):4d}/{len(todo)} {r['status']:8s} {r['seconds']:6.1f}s {key}"
                + (f"  | {r['reason'][:140]}" if r.get("reason") else ""),
                flush=True,
            )
    for x in workers:
        x.kill()
    return res


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    ap.add_argument("--ddp", default="torch.nn.parallel.DistributedDataParallel")
    ap.add_argument("--out", default="results.json")
    ap.add_argument("--keys", help="JSON list of the Class.test names to run; all if it is not given")
    ap.add_argument("--only", help="regex on Class.test names")
    ap.add_argument("--timeout", type=float, default=60, help="seconds per test")
    ap.add_argument("--jobs", type=int, default=1)
    ap.add_argument("--world-size", type=int, default=2)
    ap.add_argument("--run-disabled", action="store_true", help="also tests switched off upstream by unittest.skip")
    ap.add_argument("--pythonpath", action="append", default=[], help="where the class under test lives")
    ap.add_argument("--logs", default=os.path.join(os.getcwd(), "conf_logs"))
    ap.add_argument("--tmp", default=os.path.join(os.getcwd(), "conf_tmp"))
    a = ap.parse_args()
    with open(a.out, "w") as f:
        json.dump({"results": run(a)}, f, indent=1)


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
