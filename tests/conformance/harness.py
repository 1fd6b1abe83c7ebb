#!/usr/bin/env python3
"""Run PyTorch's own DistributedDataParallel tests against any class with the same API.

  harness.py --ddp torchddp.DistributedDataParallel --out r.json [--baseline results.json]
  harness.py --file /path/to/test_c10d_gloo.py --cls 'DistributedDataParallel|Reducer' --out r.json

The tests come from the installed torch (torch.testing._internal.distributed.distributed_test) or,
with --file, from a test file somewhere on disk; nothing of them is kept here.
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
    if os.environ.get("CONF_FILE"):
        conf_boot.load_file(os.environ["CONF_FILE"])


# ------------------------------------------------------------------------------- worker
def uses_ddp(cls, files):
    """Names of the tests of `cls` that reach DistributedDataParallel, directly or through helpers."""
    import ast
    import inspect
    import textwrap

    names = {}
    for c in cls.__mro__:
        if c in (object,) or c.__module__ in ("unittest.case", "torch.testing._internal.common_utils"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(c)))
        except (OSError, TypeError, SyntaxError, IndentationError):
            continue
        for n in tree.body[0].body:
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                s = names.setdefault(n.name, set())
                for x in ast.walk(n):
                    if isinstance(x, ast.Attribute):
                        s.add(x.attr)
                    elif isinstance(x, ast.Name):
                        s.add(x.id)
    hit = {k for k, s in names.items() if s & {"DistributedDataParallel", "DDP", "replicate", "Reducer"}}
    grew = True
    while grew:
        grew = False
        for k, s in names.items():
            if k not in hit and s & hit:
                hit.add(k)
                grew = True
    # parametrized tests: test_x_use_reentrant_False -> test_x
    return lambda t: any(t == h or (h.startswith("test") and t.startswith(h + "_") and t not in names) for h in hit)


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
    sys.path.insert(0, HERE)
    import conf_boot

    def say(o):
        out.write(json.dumps(o) + "\n")

    path = os.environ.get("CONF_FILE")
    missing = []
    try:
        if path:
            classes, missing = conf_boot.load_file(path)
        else:
            from conf_cases import WheelDistTest

            classes = [WheelDistTest]
    except Exception as e:
        import traceback

        say({"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()})
        return
    tests = {}
    pat = re.compile(os.environ.get("CONF_CLS", ""))
    for c in classes:
        if not pat.search(c.__name__):
            continue
        ddp = uses_ddp(c, None)
        for n in unittest.TestLoader().getTestCaseNames(c):
            tests[f"{c.__name__}.{n}"] = (c, n, ddp(n))
    import torch

    say(
        {
            "tests": {k: v[2] for k, v in tests.items()},
            "torch": torch.__version__,
            "missing": missing,
            "target": f"{conf_boot._state['target'].__module__}.{conf_boot._state['target'].__qualname__}",
        }
    )
    for line in sys.stdin:
        key, log = json.loads(line)
        cls, name, _ = tests[key]
        fd = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        # one process per test: whatever a test leaves behind goes with it
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(r)
            got = run_one(cls, name)
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
    def __init__(self, a, path):
        r, w = os.pipe()
        env = dict(
            os.environ,
            CONF_FD=str(w),
            CONF_DDP=a.ddp,
            CONF_SHIM=a.shim,
            CONF_TIMEOUT=str(a.timeout),
            CONF_START=a.start_method,
            CONF_CLS=a.cls,
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
        env.pop("CONF_FILE", None)
        if path:
            env["CONF_FILE"] = path
        if a.file_root:
            env["CONF_FILE_ROOT"] = a.file_root
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


def first_error(msg, log):
    """The line that says what went wrong, for the summary."""
    text = msg
    m = re.findall(r"^(\w[\w.]*(?:Error|Exception|Failure|Timeout)\b.*)$", text, re.M)
    if m:
        inner = [x for x in m if not x.startswith("RuntimeError: Process ")]
        return (inner or m)[0][:400]
    return (text.strip().splitlines() or [""])[-1][:400]


def run(a, path):
    os.makedirs(a.logs, exist_ok=True)
    os.makedirs(a.tmp, exist_ok=True)
    w = Worker(a, path)
    h = w.hello
    if not h or "tests" not in h:
        w.kill()
        return {"error": (h or {}).get("error", "worker did not start"), "trace": (h or {}).get("trace", "")}, {}
    only = re.compile(a.only) if a.only else None
    if a.keys:
        want = set(json.load(open(a.keys)))
        tag = os.path.splitext(os.path.basename(path))[0] + "::" if path else ""
        todo = [k for k in h["tests"] if tag + k in want]
    else:
        todo = [k for k, ddp in h["tests"].items() if (ddp or a.all) and (not only or only.search(k))]
    if a.skip:
        todo = [k for k in todo if not re.search(a.skip, k)]
    info = {
        "torch": h["torch"],
        "target": h["target"],
        "stubbed": h["missing"],
        "selected": len(todo),
        "ddp_tests_in_source": sum(h["tests"].values()),
    }
    if a.list:
        w.kill()
        print("\n".join(todo))
        return info, {}
    res, workers, queue = {}, [w], list(todo)
    while len(workers) < min(a.jobs, len(todo)):
        workers.append(Worker(a, path))
    hard = a.timeout + 45
    while queue or any(x.key for x in workers):
        for x in workers:
            if x.key is None and queue:
                k = queue.pop(0)
                x.send(k, os.path.join(a.logs, k + ".log"))
        for i, x in enumerate(workers):
            if x.key is None:
                continue
            got = x.read(0.2 if len(workers) > 1 else 5)
            if got is None:
                if time.time() - x.t0 < hard:
                    continue
                got = {"status": "timeout", "seconds": round(time.time() - x.t0, 1), "message": "harness: hard limit"}
                x.kill()
                key, workers[i] = x.key, Worker(a, path)
            elif got.get("dead"):
                got = {"status": "fail", "seconds": round(time.time() - x.t0, 1), "message": "harness: worker died"}
                x.kill()
                key, workers[i] = x.key, Worker(a, path)
            else:
                key, x.key = x.key, None
            r = {"status": got["status"], "seconds": got["seconds"]}
            if got["message"]:
                r["reason"] = first_error(got["message"], None)
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
    return info, res


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    ap.add_argument("--ddp", default="torch.nn.parallel.DistributedDataParallel")
    ap.add_argument("--out", default="results.json")
    ap.add_argument("--only", help="regex on Class.test names")
    ap.add_argument("--skip", help="regex of tests to leave out")
    ap.add_argument("--keys", help="JSON list (or object) of exact Class.test names to run")
    ap.add_argument("--all", action="store_true", help="also tests that never reach DDP")
    ap.add_argument("--timeout", type=float, default=60, help="seconds per test")
    ap.add_argument("--jobs", type=int, default=1)
    ap.add_argument("--world-size", type=int, default=2)
    ap.add_argument(
        "--shim", choices=["cpu", "none"], default="cpu", help="run GPU tests on CPU (default) or leave them"
    )
    ap.add_argument("--run-disabled", action="store_true", help="also tests switched off upstream by unittest.skip")
    ap.add_argument("--start-method", choices=["fork", "spawn"], default="fork")
    ap.add_argument(
        "--file",
        action="append",
        help="a test file by path instead of the wheel's tests; may repeat ('wheel' is the wheel's)",
    )
    ap.add_argument("--file-root", help="extra sys.path entry for --file")
    ap.add_argument("--cls", default="", help="regex on test class names")
    ap.add_argument("--pythonpath", action="append", default=[], help="where the class under test lives")
    ap.add_argument("--baseline", help="results of torch's own class; prints 'N of M'")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--logs", default=os.path.join(os.getcwd(), "conf_logs"))
    ap.add_argument("--tmp", default=os.path.join(os.getcwd(), "conf_tmp"))
    a = ap.parse_args()
    t0 = time.time()
    all_info, all_res = [], {}
    for path in a.file or [None]:
        path = None if path == "wheel" else path
        info, res = run(a, os.path.abspath(path) if path else None)
        info["file"] = path or "wheel"
        if "error" in info:
            print(f"cannot load {path}: {info['error']}\n{info.get('trace', '')[-1500:]}")
        all_info.append(info)
        tag = os.path.splitext(os.path.basename(path))[0] + "::" if path else ""
        all_res.update({tag + k: v for k, v in res.items()})
    if a.list:
        return
    n = {s: sorted(k for k, v in all_res.items() if v["status"] == s) for s in ("pass", "fail", "timeout", "skip")}
    out = {
        "ddp": a.ddp,
        "world_size": a.world_size,
        "shim": a.shim,
        "start_method": a.start_method,
        "run_disabled": a.run_disabled,
        "seconds": round(time.time() - t0, 1),
        "runs": all_info,
        "counts": {s: len(v) for s, v in n.items()},
        "results": all_res,
    }
    print("; ".join(f"{s} {len(v)}" for s, v in n.items()), f"; {out['seconds']} s")
    if a.baseline:
        base = json.load(open(a.baseline))
        ref = {k for k, v in base["results"].items() if v["status"] == "pass"}
        # What was left out on purpose is not expected; a file that could not be loaded still is.
        if a.skip:
            ref = {k for k in ref if not re.search(a.skip, k)}
        if a.only:
            ref = {k for k in ref if re.search(a.only, k.split("::")[-1])}
        if a.keys:
            ref &= set(all_res)
        ok = ref & set(n["pass"])
        out["conformance"] = {"passed": len(ok), "of": len(ref), "missed": sorted(ref - ok)}
        print(f"{len(ok)} of {len(ref)} that torch's own class passes here")
        for k in sorted(ref - ok):
            print(
                "   missed:",
                k,
                "|",
                all_res.get(k, {}).get("status", "not run"),
                "|",
                all_res.get(k, {}).get("reason", "")[:160],
            )
    else:
        print(f"{len(n['pass'])} of {len(all_res)} pass (no baseline given)")
    json.dump(out, open(a.out, "w"), indent=1)


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
