"""What surrounds an engine in a replica: errors in OpenAI's form, its guard, its settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from ray_engines.client_errors import REPLICA_DIED, OpenAIErrors
from ray_engines.local_ray import search_path
from ray_engines.replica_settings import Settings
from support.waiting import PATIENCE_S, wait_for_end, wait_until

JSON, EVENTS, TEXT = b"application/json", b"text/event-stream; charset=utf-8", b"text/plain"
DIED = {
    "error": {
        "message": REPLICA_DIED,
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


def start(status: int, kind: bytes, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), *more],
    }


def body(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def answer(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what reaches the client if the proxy sends these messages."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(OpenAIErrors(app)({"type": "http"}, receive, send))
    return sent


def test_a_request_that_nobody_answered_is_answered() -> None:
    first, last = answer()
    assert first["status"] == 503
    assert dict(first["headers"])[b"content-type"] == JSON
    assert int(dict(first["headers"])[b"content-length"]) == len(last["body"])
    assert json.loads(last["body"]) == DIED


def test_a_stream_that_broke_off_ends_with_an_error() -> None:
    *sent, last = answer(start(200, EVENTS), body(b'data: {"a": 1}\n\n', more=True))
    assert sent == [start(200, EVENTS), body(b'data: {"a": 1}\n\n', more=True)]
    event, done, rest = last["body"].split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == DIED
    assert (done, rest) == (b"data: [DONE]", b"")
    assert not last["more_body"]


@pytest.mark.parametrize(
    "messages",
    [
        [start(200, EVENTS), body(b"data: 1\n\n", more=True), body(b"data: [DONE]\n\n")],
        [start(503, JSON), body(b'{"error": {"code": 503}}')],
        [start(200, TEXT), body(b"metrics")],
        [start(200, JSON), body(b"{", more=True)],  # nothing can be added to half an object
    ],
)
def test_all_other_answers_are_passed_on(messages: list[dict[str, Any]]) -> None:
    assert answer(*messages) == messages


def test_the_proxys_own_errors_become_json() -> None:
    retry = (b"retry-after", b"5")
    length = (b"content-length", b"8")
    first, last = answer(start(503, TEXT, length, retry), body(b"too busy"))
    assert first["status"] == 503
    assert first["headers"].count(retry) == 1
    assert length not in first["headers"]
    error = json.loads(last["body"])["error"]
    assert (error["message"], error["type"]) == ("too busy", "ServiceUnavailableError")


GUARDED = """
import os, subprocess, sys
from multiprocessing import shared_memory
from ray_engines.guard import Guard
guard = Guard()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
memory = shared_memory.SharedMemory(create=True, size=8)
print(child.pid, guard._process.pid, memory.name, flush=True)
if sys.stdin.readline():
    guard.dismiss()
    print(os.path.exists(f"/dev/shm/{memory.name}"), flush=True)
"""


@pytest.mark.parametrize("death", ["kill", "group", "leave"])
def test_no_process_outlives_a_guarded_one(death: str) -> None:
    """It is killed alone, is killed with its group (by Ray), or exits by itself."""
    guarded = subprocess.Popen(
        [sys.executable, "-c", GUARDED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search_path()},
        process_group=0,  # as Ray starts its workers
    )
    assert guarded.stdin is not None
    assert guarded.stdout is not None
    child_pid, guard_pid, memory = guarded.stdout.readline().split()
    child, guard = psutil.Process(int(child_pid)), psutil.Process(int(guard_pid))
    others = [child, guard, *psutil.Process(guarded.pid).children(recursive=True)]
    try:
        if death == "kill":
            guarded.kill()
        elif death == "group":
            os.killpg(guarded.pid, signal.SIGKILL)
        else:
            guarded.stdin.write("leave\n")
            guarded.stdin.flush()
            assert guarded.stdout.readline() == "False\n"  # Ray would kill the tracker now
        guarded.wait(PATIENCE_S)
        stays = {child} if death == "leave" else set()
        wait_for_end(set(others) - stays)
        assert all(process.is_running() for process in stays)
        wait_until(lambda: not os.path.exists(f"/dev/shm/{memory}"), "no shared memory")
    finally:
        for process in others:
            if process.is_running():
                process.kill()
        guarded.stdin.close()
        guarded.stdout.close()


def test_cores_are_shared_by_as_many_replicas_as_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    shared = Settings(min_replicas=1, max_replicas=3)
    assert (shared.num_threads, shared.num_cpus) == (2, 2)
    crowded = Settings(max_replicas=16)
    assert (crowded.num_threads, crowded.num_cpus) == (1, 0.5)
    assert Settings(threads=3, max_replicas=2).environment()["OMP_NUM_THREADS"] == "3"


def test_settings_come_as_text_from_the_command_line_of_serve() -> None:
    from_serve: dict[str, Any] = {"min_replicas": "1", "max_replicas": "3"}
    from_serve |= {"ongoing_requests": "4", "max_ongoing_requests": "64"}
    options = Settings(**from_serve).deployment_options()
    assert "num_replicas" not in options
    assert options["autoscaling_config"]["max_replicas"] == 3
    assert options["autoscaling_config"]["target_ongoing_requests"] == 4
    assert options["max_ongoing_requests"] == 64
    assert Settings(min_replicas=2, max_replicas=2).deployment_options()["num_replicas"] == 2
    arguments = Settings(drafter="", vllm_arguments=("--dtype", "float32")).serve_arguments()
    assert not [argument for argument in arguments if "speculative" in argument]
    assert arguments[-2:] == ["--dtype", "float32"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is more than max_replicas 2"),
        ({"replicas": 2}, "replicas"),
        ({"max_replicas": 0}, "max_replicas"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings(**wrong)
