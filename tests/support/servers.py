"""Real `vllm serve` processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from support.waiting import PATIENCE_S, wait_for_end, wait_until
from vllm_dflash.tools.default_dtype import emulates_bfloat16

VLLM = str(Path(sys.executable).with_name("vllm"))
MODEL = "demo"
SECONDS_TO_START = 2 * PATIENCE_S
"""Starting includes compiling."""


@dataclass
class Server:
    url: str
    log: Path
    client: openai.OpenAI
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """Sum of a Prometheus counter over its labels."""
        families = text_string_to_metric_families(get(f"{self.url}/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    def complete(self, prompt: str, max_tokens: int = 48) -> str:
        answer = self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0.0
        )
        return answer.choices[0].text


def get(url: str) -> httpx.Response:
    """Get a URL. Certificates are not read, which would take 50 ms of a core."""
    return httpx.get(url, verify=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(
    log: Path, target: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server of this target, ready for requests; end it by Ctrl-C, nothing left behind."""
    port = free_port()
    command = [VLLM, "serve", str(target), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    if emulates_bfloat16():  # minutes for each start
        command += ["--dtype", "float32"]
    command += arguments
    with running(command, port, log, environment) as server:
        yield server
        # Read before the shutdown, in which vLLM may report its own engine as dead.
        assert "Traceback" not in log.read_text()


@contextmanager
def running(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a command that serves at this port; yield when it is ready; end it by Ctrl-C."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(httpx.HTTPError):
                return get(f"{url}/health").status_code == 200
            return False

        wait_until(is_ready, f"a server; its log: {log}", SECONDS_TO_START)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Server(url, log, client, process)
    except BaseException:
        print(f"The end of {log}:\n{log.read_text()[-8000:]}")  # pytest shows it
        raise
    finally:
        engines = []
        if process.poll() is None:
            engines = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    wait_for_end(engines)
