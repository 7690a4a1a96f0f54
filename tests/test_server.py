"""A real `vllm serve`, compiled as users run it, driven by the openai client."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from engines import DRAFTER, TARGET, held_out_prompts

pytestmark = pytest.mark.server
MODEL = "demo"
PROMPT = held_out_prompts(1)[0]


@dataclass
class Server:
    url: str
    log: Path
    client: openai.OpenAI

    def metric(self, name: str) -> float:
        """Sum of a Prometheus counter over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def complete(self, prompt: str, max_tokens: int = 48) -> str:
        answer = self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0.0
        )
        return answer.choices[0].text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(TARGET)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "512", "--max-num-seqs", "16"]
    command += ["--speculative-config.method", "dflash"]
    command += ["--speculative-config.model", str(DRAFTER)]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Server(url, log, client)
        # Read before the shutdown, in which vLLM may report its own engine as dead.
        assert "Traceback" not in log.read_text()
    finally:
        engines = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert not psutil.wait_procs(engines, timeout=10)[1]


def test_one_line_says_that_we_are_active(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "is active" in line]
    assert len(lines) == 1
    assert "INFO" in lines[0]
    assert re.search(
        r"vllm-dflash \d+\.\d+\.\d+ is active: runner v1, block size 8,"
        r" drafting up to 7 tokens a step, taps \[1, 3, 4\]",
        lines[0],
    )


def test_completion_accepts_drafts(server: Server) -> None:
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert server.complete(PROMPT)
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > before
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") < drafted


def test_streaming_gives_the_same_text(server: Server) -> None:
    stream = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=48, temperature=0.0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) > 1
    assert "".join(pieces) == server.complete(PROMPT)


def test_chat(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=24,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_a_client_that_hangs_up_mid_stream_harms_nobody(server: Server) -> None:
    expected = server.complete(PROMPT)
    streams = [
        server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=400, temperature=0.0, stream=True
        )
        for prompt in held_out_prompts(4)
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    assert server.complete(PROMPT) == expected
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.metric("vllm:num_requests_running") == 0


def test_a_request_that_ends_at_the_context_limit_among_others(server: Server) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    room = 512 - httpx.post(f"{server.url}/tokenize", json=body).json()["count"]
    stream = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=room,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    texts = [server.complete(prompt, max_tokens=16) for prompt in held_out_prompts(6)]
    assert all(texts)
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == room
