"""A server whose engine is killed says so and exits in bounded time."""

from __future__ import annotations

import shutil
import signal
import threading
from pathlib import Path

import httpx
import openai
import psutil

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.servers import MODEL, Server, serving
from support.waiting import PATIENCE_S, wait_for_end, wait_until

DFLASH = ["--speculative-config.method=dflash"]


def test_the_engine_is_killed_under_load(tmp_path: Path) -> None:
    """Clients get an error, not silence; the server exits by itself, and nothing stays behind.

    Its drafter is in a read-only folder, where it need not write.
    """
    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTER, drafter)
    for path in (*drafter.iterdir(), drafter):
        path.chmod(0o555 if path.is_dir() else 0o444)
    arguments = ["--enforce-eager", *DFLASH, f"--speculative-config.model={drafter}"]
    running = serving(tmp_path / "log", TARGET, *arguments)
    server = running.__enter__()
    try:
        assert server.complete(held_out_prompts(1)[0])
        kill_the_engine(server)
        assert "is active" in server.log.read_text()
    finally:
        # Its log is full of the engine's death, which `serving` would treat as a fault.
        server.log.write_text("")
        running.__exit__(None, None, None)
    assert sorted(path.name for path in drafter.iterdir()) == ["config.json", "model.safetensors"]


def kill_the_engine(server: Server) -> None:
    endings: list[str] = []
    clients = [
        threading.Thread(target=endless, args=(server, prompt, endings), daemon=True)
        for prompt in held_out_prompts(6)
    ]
    for client in clients:
        client.start()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 6, "all in flight")
    family = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [process for process in family if "EngineCore" in process.name()]
    engine.send_signal(signal.SIGKILL)
    server.process.wait(PATIENCE_S)  # exit code 0 was seen, so the code says nothing
    for client in clients:
        client.join(PATIENCE_S)
    assert len(endings) == 6, "a client still waits"
    assert set(endings) <= {"InternalServerError", "APIConnectionError", "APIError"}, endings
    wait_for_end(family)


def endless(server: Server, prompt: str, endings: list[str]) -> None:
    """A client that asks again as long as it is answered."""
    while True:
        try:
            with server.client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=400,
                stream=True,
                timeout=PATIENCE_S,
                extra_body={"ignore_eos": True},
            ) as stream:
                for _ in stream:
                    pass
        except openai.APIError as error:
            endings.append(type(error).__name__)
            return
        except httpx.RemoteProtocolError:  # the connection broke in mid-stream
            endings.append("APIConnectionError")
            return
