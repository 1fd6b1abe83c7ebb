"""The benchmark over two emulated hosts: the network it asks for, its numbers, its table, its errors."""

from __future__ import annotations

import io
import os
import shutil
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.two_hosts import cli, launch, network, report, results, run
from torchddp.harness import machine
from torchddp.harness.variants import TORCH_DDP, TORCHDDP, ArgumentError, Role, Variant, make_variants

GBIT = 1_000_000_000
TORCH = ["--ours", TORCH_DDP]
HOSTS = network.make_hosts(77)

# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", GBIT), ("2.5Gbit", 2_500_000_000), (" 10mbit", 10_000_000), ("100gbit", 100 * GBIT)]
)
def test_rates_are_bits_per_second(text: str, rate: int) -> None:
    assert network.parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "1", "fast", "1kbit", "-1gbit", "0gbit", "9mbit", "101gbit", "1e3mbit", "nangbit"]
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--rate wants 10mbit to 100gbit"):
        network.parse_rate(text)


def test_namespaces_carry_the_process_id_and_addresses_are_private() -> None:
    assert [host.namespace for host in HOSTS] == ["torchddp-77-0", "torchddp-77-1"]
    assert all(host.address.startswith("10.") for host in HOSTS)
    assert len({host.address for host in HOSTS}) == 2


def test_the_network_is_built_inside_the_namespaces_only() -> None:
    commands = network.setup_commands(HOSTS, GBIT)
    assert commands[:2] == [["ip", "netns", "add", host.namespace] for host in HOSTS]
    # The pair comes to be with each end in its namespace.
    assert " ".join(commands[2]) == ("ip -n torchddp-77-0 link add slow0 type veth peer name slow0 netns torchddp-77-1")
    for command in commands[2:]:
        assert command[1] == "-n" and command[2].startswith("torchddp-77-") or command[:3] == ["ip", "netns", "exec"]


def test_each_end_is_limited_before_it_is_up() -> None:
    lines = [" ".join(command) for command in network.setup_commands(HOSTS, GBIT)]
    for host in HOSTS:
        limit = f"tc -n {host.namespace} qdisc add dev slow0 root tbf rate 1000000000bit burst 125000 latency 50ms"
        assert lines.index(limit) < lines.index(f"ip -n {host.namespace} link set slow0 up")
        assert f"ip -n {host.namespace} link set lo up" in lines
        assert f"ip -n {host.namespace} addr add {host.address}/30 dev slow0" in lines


def test_a_burst_is_a_millisecond_and_at_least_one_large_packet() -> None:
    assert network.burst_bytes(10 * GBIT) == 1_250_000
    assert network.burst_bytes(10_000_000) == 64 * 1024


def test_two_ranks_run_on_each_host() -> None:
    assert [launch.host_of(rank, HOSTS, 2) for rank in range(4)] == [HOSTS[0]] * 2 + [HOSTS[1]] * 2
    command = launch.worker_command(HOSTS[1], "benchmarks.two_hosts.worker", 5)
    assert command[:4] == ["ip", "netns", "exec", "torchddp-77-1"]
    assert command[5:] == ["-m", "benchmarks.two_hosts.worker", "5"]


def test_ranks_use_the_slow_link_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    environment = launch.worker_environment()
    assert environment["GLOO_SOCKET_IFNAME"] == network.INTERFACE
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_slower_link_is_waited_for_longer() -> None:
    assert [run.patience(rate) for rate in (10 * GBIT, GBIT, GBIT // 10)] == [1, 1, 10]


# --- results and their table -----------------------------------------------------------------------------------------


def field(transport: str = "auto") -> tuple[Variant, ...]:
    return results.with_transport(make_variants(TORCHDDP, (), (1, 100)), transport)


def test_a_transport_is_passed_to_ours_only_and_auto_is_left_to_the_class() -> None:
    assert field() == make_variants(TORCHDDP, (), (1, 100))
    (ours,) = (variant for variant in field("c10d") if variant.role is Role.OURS)
    assert (ours.name, ours.keywords) == ("torchddp, c10d", {"transport": "c10d"})
    assert all("transport" not in variant.keywords for variant in field("c10d") if variant.role is not Role.OURS)


def fake_result(transport: str = "auto", ours_ms: float = 75.0) -> dict[str, Any]:
    """A local step of 20 ms; torch 120, 100, 110; each byte once over the link with ours, one and a half with torch."""
    step_ms = np.array([20.0, 120.0, 100.0, 110.0, ours_ms])[:, None] + np.zeros((1, 30))
    by_host = [0.0, 150e6, 150e6, 150e6, 100e6]
    raw = {
        "model": "mlp",
        "title": "MLP 6 x 1024x1024",
        "parameters": 12,
        "gradient_bytes": 100_000_000,
        "step_ms": step_ms,
        "sent_bytes": [by_host, by_host],
        "transport": "c10d",
    }
    return results.two_hosts_result(field(transport), raw)


def test_the_ratio_is_of_whole_steps() -> None:
    result = fake_result()
    *_, ours = result["variants"]
    assert result["best_torch"] == "torch tuned, cap 1"
    assert ours["ratio_to_best_torch"]["median"] == pytest.approx(0.75)
    assert ours["cost"]["median"] == pytest.approx(55.0)
    assert ours["sent_bytes"] == [100e6, 100e6]
    assert "ratio_to_best_torch" not in result["variants"][0]


def printed(renderable: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(renderable)
    return stream.getvalue()


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_the_report_fits_80_columns_and_cuts_nothing(transport: str) -> None:
    document = {
        "command": "python -m benchmarks.two_hosts",
        "machine": {**machine.describe_machine(), "cores": 2},
        "settings": {"rate": GBIT},
        "results": [fake_result(transport)],
    }
    text = printed(report.render(document))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for variant in field(transport):
        assert variant.name in text
    assert "0.75 [0.75..0.75], goal 0.75 met" in text
    assert "sent by a host: ours 1.00 x the gradients, torch's best 1.50 x\n" in text
    assert "link of 1 Gbit/s each way" in " ".join(text.split())
    assert "4 ranks share 2 cores" in text


def test_a_missed_goal_is_said() -> None:
    assert "goal 0.75 missed" in str(report.verdict(fake_result(ours_ms=99.0)))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; its exit code and the one sentence it leaves on stderr."""

    def call(arguments: list[str]) -> tuple[int, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        return code, captured.err

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast"], "not 'fast'."),
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv."),
        (["--seconds", "0"], "above 0 and up to 3600, not 0."),
        (["--caps", "x"], "not 'x'."),
        (["--json", "/no/such/folder/x.json"], "the folder '/no/such/folder' does not exist."),
        (["--ours", "no_such_package.Thing"], "Cannot import 'no_such_package'"),
        (["--bogus"], "; see python -m benchmarks.two_hosts --help."),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(arguments: list[str], words: str, said: Any) -> None:
    code, text = said(arguments)
    assert code == 2 and words in text


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, text = said(TORCH)
    assert code == 2 and "run this as root." in text


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_a_missing_program_is_named(tool: str, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/sbin/{name}")
    code, text = said(TORCH)
    assert code == 2 and f"The program '{tool}' was not found" in text


def test_what_the_kernel_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(network, "check_supported", lambda: None)
    refusal = ["sh", "-c", "echo RTNETLINK answers: Operation not permitted. >&2; exit 2"]
    monkeypatch.setattr(network, "setup_commands", lambda hosts, rate: [refusal])
    code, text = said(TORCH)
    assert code == 2 and text.endswith("said: RTNETLINK answers: Operation not permitted.\n")


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "python -m benchmarks.two_hosts --rate 10gbit" in capsys.readouterr().out
