"""A server in its own process: what it is asked, how its death is told, that nothing remains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from support import importing_support
from support.fake_server import BREAKS, TOO_LONG
from support.waiting import wait_until
from vllm_dflash.tools import server, server_process
from vllm_dflash.tools.completions import Finished, Request, complete, counts, decode, encode, steps
from vllm_dflash.tools.server import EngineDied, Server, flag_names, temporary_logs

FAKE = "support.fake_server"
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a server that answers as `fake_server.py` does."""
    monkeypatch.setattr(server, "SECONDS_BETWEEN_LOOKS", 0.05)

    def start(model: str = "target", *flags: str, **named: Any) -> Server:
        environment = importing_support() | named.pop("environment", {})
        log = tmp_path / "logs" / "log"
        return Server(log, model, flags, environment=environment, module=FAKE, **named)

    return start


def is_gone(group: int) -> bool:
    """Whether a group of processes has ended and is reaped, which may be init's work."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_is_started(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "of the shell")
    config = {"method": "dflash"}
    environment = {"MARK": "of the side"}
    with start("m", "--seed", "7", speculative_config=config, environment=environment) as one:
        facts: Any = one.wait()
    assert facts["dtype"] == "float32"
    assert facts["mark"] == "of the side"
    model, *flags = facts["flags"][1:]
    assert model == "m"
    assert flags[:4] == ["--seed", "7", "--host", "127.0.0.1"]  # ours count, being last
    assert flags[-2:] == ["--speculative-config", '{"method": "dflash"}']
    assert one.url.startswith("http://127.0.0.1:")
    assert one._process.returncode == 0


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--model=m", "set before it"),
        ("--speculative_config", "set before it"),
        ("-sc", "set before it"),
        ("--spec-method", "set before it"),
        ("--ssl-keyfile=k", "could not ask"),
        ("--uds", "could not ask"),
        ("--disable_log_stats", "could not ask"),
    ],
)
def test_flags_that_are_not_taken(start: Start, flag: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"after --: .*{reason}"):
        start("target", flag)


def test_a_server_ends_if_its_parent_had_ended_before_it_ran(start: Start) -> None:
    with start(environment={server_process.PARENT: "1"}) as one:
        one._process.wait(2 * server_process.SECONDS_TO_STOP)
        with pytest.raises(EngineDied):
            one.wait()


def test_flags_are_named_as_vllm_spells_them() -> None:
    flags = ["--kv_cache_memory_bytes=4", "--model-impl", "a_b", "-tp", "2"]
    assert flag_names(flags) == {"--kv-cache-memory-bytes", "--model-impl", "-tp"}


def test_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_STOP", 0.1)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    with start() as one:
        one.wait()
        assert encode(one, ["ab", "ä"]) == [[97, 98], [0xC3, 0xA4]]
        assert encode(one, ["a"], {"t": 1}) == [[*b'<a{"t": 1}>']]
        assert decode(one, [97, 98]) == "ab"
        assert counts(one) == {"drafts": 7.0, "accepted_tokens": 3.0}
        assert [*steps(one, Request([1, 2], 5))] == [[3, 4], [5, 6], [7]]
        requests = [Request([3], 2), Request([7], 20), Request([4], 1, 8), Request([4], 1, 5)]
        finished: list[int] = []
        assert complete(one, requests, 3, finished.append) == [
            Finished([4, 5], None),
            Finished([8, 9], None),
            Finished([5], 3.0),
            Finished([5], 0.0),
        ]
        assert finished == [1, 2, 3, 4]
        with pytest.raises(ValueError, match=r"^the prompt is too long$"):
            complete(one, [Request([1] * TOO_LONG, 1)], 1)
        monkeypatch.setattr(server, "SECONDS_TO_STOP", 0.1)
        with pytest.raises(
            EngineDied, match=r"^an engine failed: the stream broke\nits log: "
        ) as end:
            [*steps(one, Request([BREAKS], 5))]
        assert str(one.log) in str(end.value)


def test_nobody_else_gets_the_port(start: Start) -> None:
    with start("dead") as one, socket.socket() as other:
        port = int(one.url.rpartition(":")[2])
        with pytest.raises(OSError, match="already in use"):
            other.bind((server.HOST, port))
        other.bind((server.HOST, 0))


def test_concurrency_is_exact(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It limits the requests in flight, and reaches the limit."""
    running, most = 0, []
    lock = threading.Lock()
    ask = Server.ask

    def counted(self: Server, path: str, body: Any = None) -> Any:
        nonlocal running
        with lock:
            running += 1
            most.append(running)
        answer = ask(self, path, body)
        with lock:
            running -= 1
        return answer

    with start() as one:
        one.wait()
        monkeypatch.setattr(Server, "ask", counted)
        complete(one, [Request([1], 4)] * 9, 3)
    assert max(most) == 3
    assert most.count(3) > len(most) / 2


def test_a_refused_start(start: Start) -> None:
    with start("refused") as one:
        with pytest.raises(ValueError, match=r"^the pair\ndoes not fit$"):
            one.wait()
        assert "Traceback" in one.log.read_text()  # where it was raised
    assert one._process.returncode == server_process.REFUSED


def test_a_death_names_the_root_cause_first(start: Start) -> None:
    with start() as one:
        one.wait()
        with pytest.raises(EngineDied) as death:
            complete(one, [Request([0], 1)], 1)
        assert str(death.value).splitlines() == [
            "an engine died:",
            "  weights.LoadError: too short",
            "  RuntimeError: Engine core initialization failed.",
            f"its log: {one.log}",
        ]
        with pytest.raises(EngineDied):  # it stays dead
            encode(one, ["a"])


def test_a_death_without_an_error_shows_the_end_of_the_log(start: Start) -> None:
    with start("dead") as one, pytest.raises(EngineDied) as death:
        one.wait()
    assert str(death.value).splitlines() == [
        "an engine died; the end of its log:",
        "  serving",
        "  last words",
        f"its log: {one.log}",
    ]


def test_a_server_that_does_not_end_is_killed_with_its_processes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_STOP", 0.5)
    with start("stubborn", environment={"MARK": str(tmp_path / "up")}) as one:
        wait_until((tmp_path / "up").exists, "a server")
        group = one._process.pid
    assert one._process.returncode == -signal.SIGKILL
    wait_until(lambda: is_gone(group), "no process of the group")


PARENT = """
import sys, time
from pathlib import Path
from support import importing_support
from vllm_dflash.tools import cli, server
from vllm_dflash.tools.demo import demo_command

folder, model = Path(sys.argv[1]), sys.argv[2]
if model == "stubborn":
    server.SECONDS_TO_STOP = 0.5
environment = importing_support() | {"MARK": str(folder / "up")}

def run_demo(parsed):
    with server.Server(
        folder / "log", model, environment=environment, module="support.fake_server"
    ) as one:
        (folder / "pid").write_text(str(one._process.pid))
        one.wait()
        (folder / "up").touch()
        time.sleep(600)

demo_command.run_demo = run_demo
sys.exit(cli.main(["demo", "--target", "t", "--drafter", "d"]))
"""


@pytest.mark.parametrize(
    ("how", "model"),
    [(signal.SIGKILL, "stubborn"), (signal.SIGTERM, "stubborn"), (signal.SIGINT, "sound")],
)
def test_a_command_that_ends_takes_its_servers_with_it(
    tmp_path: Path, how: signal.Signals, model: str
) -> None:
    """As after Ctrl-C, a time limit, a cancelled job, or running out of memory."""
    environment = os.environ | importing_support()
    # Processes that a shell starts in the background ignore interrupts.
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    command = [sys.executable, "-c", PARENT, str(tmp_path), model]
    with subprocess.Popen(command, env=environment, preexec_fn=heard) as parent:
        wait_until((tmp_path / "up").exists, "a server")
        parent.send_signal(how)
        group = int((tmp_path / "pid").read_text())
        wait_until(lambda: is_gone(group), "no process of the group")
    assert parent.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}.get(how, -9)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Processes that a shell starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_does_not_wait_for_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    respond = Server._respond

    def slow(self: Server, path: str, body: Any = None) -> HTTPResponse:
        if path == "/v1/completions":
            asked.set()
            time.sleep(5)
        return respond(self, path, body)

    def interrupt() -> None:
        asked.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with start() as one:
        one.wait()
        monkeypatch.setattr(Server, "_respond", slow)
        threading.Thread(target=interrupt, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            complete(one, [Request([1], 4)] * 9, 3)
        assert time.monotonic() - began < 4
        group = one._process.pid
    wait_until(lambda: is_gone(group), "no process of the group")


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, EngineDied])
def test_logs_are_kept_where_they_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        with temporary_logs("prefix-") as folder:
            (folder / "log").touch()
            if error is not None:
                raise error(folder / "log")
    except (ValueError, KeyboardInterrupt, EngineDied):
        pass
    assert [one.name.startswith("prefix-") for one in tmp_path.iterdir()] == (
        [True] if error in (EngineDied, KeyboardInterrupt) else []
    )
