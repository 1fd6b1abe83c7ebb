"""`monitor` through OpenTelemetry's SDK, and into a real Prometheus as docs/monitoring.md says."""

import contextlib
import copy
import importlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import torchddp
from tests.distributed.test_profiler import steps
from tests.harness import assert_each_raises, each, logged, on_ranks, through_a_file
from tests.models import linears
from tests.pages import DOCS, blocks_of, rows
from tests.programs import TORCHRUN, clean_environment, free_port
from tests.unit.helpers import wait_until
from torchddp import DDP, notices
from torchddp.profiler import monitor, profile

pytestmark = pytest.mark.beyond_torch("exports torchddp's numbers")
WIDTH, LAYERS = 16, 4
BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4


class Metrics:
    """A provider of its own, and what a reader finds in it."""

    def __init__(self):
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def read(self):
        """By name: the instrument's unit and its points."""
        metrics = self._reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: (metric.unit, list(metric.data.data_points)) for metric in metrics}

    def point(self, name):
        (point,) = self.read()[name][1]
        return point

    def value(self, name):
        return self.point(name).value


@on_ranks(2)
def test_what_two_ranks_count(rank):
    for transport in each(["c10d", "shm"]):
        ddp = DDP(linears(LAYERS, WIDTH), bucket_cap_mb=0.001, transport=transport)
        metrics, told = Metrics(), []
        log = monitor(ddp, lambda step, values, told=told: told.append(values))
        with monitor(ddp, meter_provider=metrics.provider):
            steps(ddp, 3)
            with ddp.no_sync():
                steps(ddp, 1)
            with pytest.raises(ZeroDivisionError):  # its step is never finished
                output = ddp(torch.randn(2, WIDTH))
                output.register_hook(lambda grad: 1 / 0)
                output.sum().backward()
            steps(ddp, 1)
            with profile(ddp) as recorded:
                steps(ddp, 4)
            # A thread passes the numbers on each second; the last step is counted when the next one begins.
            assert wait_until(lambda metrics=metrics: metrics.value("torchddp.steps") == 7)
            log.close()
            ddp.eval()
            with torch.no_grad():
                ddp(torch.randn(2, WIDTH))
            assert wait_until(lambda metrics=metrics: metrics.value("torchddp.steps") == 8)
            assert len(told) == 8
            assert metrics.value("torchddp.buckets") == len(ddp.reducer.plan.buckets) == told[-1]["ddp/buckets"]
        steps(ddp, 3)  # not counted
        found = metrics.read()
        points = {name: points[0] for name, (_, points) in found.items() if len(points) == 1}
        assert points.keys() == found.keys()
        assert dict(points["torchddp.steps"].attributes) == {
            **{"rank": rank, "world_size": 2, "transport": transport, "model": "Sequential"}
        }
        assert points["torchddp.steps"].value == 8 and points["torchddp.buckets"].value == 0
        # Between two ranks an all-reduce sends half of the bytes twice.
        assert points["torchddp.communication.sent"].value == sum(v["ddp/wire_bytes"] for v in told) == 8 * BYTES
        for name, key in (("step.duration", "step_ms"), ("communication.exposed", "exposed_ms")):
            point = points[f"torchddp.{name}"]
            assert point.count == 8
            assert point.sum == pytest.approx(sum(values[f"ddp/{key}"] for values in told) / 1e3)
        profiled_s = sum(step.duration_ns for step in recorded.steps) / 1e9
        assert len(recorded.steps) == 4 and 0 < profiled_s < 2 * points["torchddp.step.duration"].sum < 20
        section = (DOCS / "monitoring.md").read_text().split("## Instruments\n")[1].split("\n## ")[0]
        shown = dict(re.findall(r"^\| `(.+?)`[^|]*\| ([^|]+?) \|", section, re.MULTILINE))
        assert shown == {name: unit for name, (unit, _) in found.items()}


@on_ranks(2)
def test_other_models_and_copies(rank):
    for kind in each(["sharded", "replicated", "compiled"]):
        module = linears(LAYERS, WIDTH)
        if kind == "sharded":
            optimizer = torchddp.optim.OSS(module.parameters(), torch.optim.SGD, lr=0.01)
            called = monitored = torchddp.ShardedDataParallel(module, optimizer)
        elif kind == "replicated":
            called = monitored = torchddp.replicate(module)
        else:
            monitored = DDP(module)
            called = torch.compile(monitored, backend="eager")
        metrics = Metrics()
        with monitor(monitored, meter_provider=metrics.provider), profile(monitored):
            steps(called, 3)
            if kind != "sharded":  # it can't be copied
                for copied in (copy.deepcopy(monitored), through_a_file(monitored, weights_only=False)):
                    steps(copied, 2)
        assert metrics.value("torchddp.steps") == 3
        assert metrics.point("torchddp.step.duration").sum > 0

    # Another process group, and another reducer.
    ddp = DDP(linears(LAYERS, WIDTH))
    metrics = Metrics()
    with monitor(ddp, meter_provider=metrics.provider):
        steps(ddp, 2)
        ddp.update_process_group([dist.new_group([each]) for each in range(2)][rank])
        steps(ddp, 2)
        ddp.module[0].requires_grad_(False)
        ddp.refresh_trainable()
        steps(ddp, 2)
    by_size = {point.attributes["world_size"]: point.value for point in metrics.read()["torchddp.steps"][1]}
    assert by_size == {2: 2, 1: 4}
    assert [point.value for point in metrics.read()["torchddp.buckets"][1]] == [0, 0]


@on_ranks(1)
def test_an_exporter_that_fails_ends_neither_the_training_nor_the_numbers(rank, monkeypatch):
    from torchddp.profiler import telemetry

    record, failures, messages = telemetry.Telemetry._record, ["no space", "no space"], logged()

    def failing(self, *arguments):
        if failures:
            raise OSError(failures.pop())
        record(self, *arguments)

    monkeypatch.setattr(telemetry.Telemetry, "_record", failing)
    monkeypatch.setattr(telemetry, "_EVERY_S", 0.05)
    ddp, metrics = DDP(linears(LAYERS, WIDTH)), Metrics()
    with monitor(ddp, meter_provider=metrics.provider):
        for left in (1, 0):
            steps(ddp, 2)
            assert wait_until(lambda left=left: len(failures) == left)
        steps(ddp, 2)
    assert len(messages) == 1 and "OpenTelemetry refuses a model's steps" in messages[0]
    assert 0 < metrics.value("torchddp.steps") <= 6


@on_ranks(2)
def test_notices_are_counted_once(rank):
    names = {kind: f"{kind}s" for kind in ("hang_report", "straggler", "stop_request")} | {"retry": "retries"}
    metrics, others = Metrics(), Metrics()
    models = [DDP(linears(1, WIDTH)) for _ in range(2)]
    first, second = (monitor(model, meter_provider=metrics.provider) for model in models)
    other = monitor(models[0], meter_provider=others.provider)
    assert {metrics.value(f"torchddp.{name}") for name in names.values()} == {0}
    for kind in names:
        notices.tell(kind, step=3)
    first.close()
    notices.tell("retry")
    del models[1], second
    assert wait_until(lambda: len(notices._listeners) == 1)  # a model that is gone is not monitored
    other.close()
    notices.tell("retry")
    assert {name: metrics.value(f"torchddp.{name}") for name in names.values()} == {
        **dict.fromkeys(names.values(), 1),
        "retries": 2,
    }
    assert others.value("torchddp.retries") == 2


@on_ranks(2)
def test_a_hang_report_is_counted(rank, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDDP_HANG_REPORT_DIR", str(tmp_path))
    ddp = DDP(linears(LAYERS, WIDTH), checks=torchddp.Checks(stall_report=0.5))
    metrics = Metrics()
    with monitor(ddp, meter_provider=metrics.provider):
        steps(ddp, 2)
        assert rank == 0 or wait_until(lambda: any(tmp_path.iterdir()))
        steps(ddp, 1)
        dist.barrier()
        reports = torch.tensor(metrics.value("torchddp.hang_reports"))
    dist.all_reduce(reports)
    assert reports == len(list(tmp_path.iterdir())) >= 1


@on_ranks(1)
def test_refused_arguments():
    ddp = DDP(linears(1, WIDTH))
    provider = Metrics().provider
    assert_each_raises(
        (lambda: monitor(ddp, every=2), ValueError, "every=2 needs a callback"),
        (lambda: monitor(ddp, print, meter_provider=provider), ValueError, "once for each"),
        (lambda: monitor(torch.nn.Linear(2, 2)), TypeError, "DistributedDataParallel or a replicated module"),
    )


@on_ranks(1)
def test_without_opentelemetry(rank):
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "torchddp.profiler"))]:
        del sys.modules[name]
    sys.modules["opentelemetry"] = None
    module = importlib.import_module("torchddp.profiler")
    model = DDP(torch.nn.Linear(2, 2))
    module.monitor(model, print).close()
    with pytest.raises(ImportError, match="monitor without a callback needs OpenTelemetry: pip install"):
        module.monitor(model)


def answer_of(port, path, deadline_s):
    """What the server says, as soon as it does."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return json.loads(answer.read())
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def asked(port, query, deadline_s):
    """By rank, what Prometheus finds, as soon as it finds something above 0 of each: rates take several steps."""
    while True:
        answer = answer_of(port, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}", deadline_s)
        found = {series["metric"]["rank"]: float(series["value"][1]) for series in answer["data"]["result"]}
        if found.keys() == {"0", "1"} and all(value > 0 for value in found.values()):
            return found
        assert time.monotonic() < deadline_s, (query, answer)
        time.sleep(0.5)


def free_ports():
    """Two that follow each other."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port, port + 1


@contextlib.contextmanager
def running(command, folder, environment):
    with (folder / Path(command[0]).name).open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{error}\n{Path(log.name).read_text()[-2000:]}") from error
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")
def test_prometheus_reads_what_the_page_exports(tmp_path):
    """The program, the configuration and the queries of docs/monitoring.md."""
    (first, second), own = free_ports(), free_port()
    (tmp_path / "train.py").write_text(blocks_of("monitoring.md", "Start")[1])
    (config,) = blocks_of("monitoring.md", "Prometheus", "yaml")
    for shown, used in (("9464", str(first)), ("9465", str(second)), (": 5s", ": 1s")):
        assert config.count(shown) == 1
        config = config.replace(shown, used)
    (tmp_path / "prometheus.yml").write_text(config)
    train = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py"]
    serve = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    environment = clean_environment(OTEL_EXPORTER_PROMETHEUS_PORT=str(first), STEPS=str(10**9))
    deadline_s = time.monotonic() + 120
    with (
        running(train, tmp_path, environment),
        running([*serve, f"--web.listen-address=127.0.0.1:{own}"], tmp_path, None),
    ):
        asked(own, "torchddp_steps_total > 100", deadline_s)
        for question, query in rows((DOCS / "monitoring.md").read_text().split("## Prometheus\n")[1]):
            query = query.strip("`")
            if "alert" in question:
                answer = answer_of(own, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}", deadline_s)
                assert answer["data"]["result"] == []
            elif question != "question":
                asked(own, query, deadline_s)
        sent = asked(own, "torchddp_communication_sent_bytes_total / torchddp_steps_total", deadline_s)
        gradients = 4 * (256 * 256 + 256 + 256 * 8 + 8)
        assert sum(sent.values()) == pytest.approx(2 * gradients, rel=0.02)  # a scrape may come amid a step's numbers
        targets = answer_of(own, "/api/v1/targets", deadline_s)["data"]["activeTargets"]
        assert [target["health"] for target in targets] == ["up", "up"]
    for port in (first, second, own):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
