"""A `vllm serve` process: start it, watch it from outside, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from soak.behaviours import MODEL

START_S, END_S = 300, 30
"""Seconds that a start may take, and the end of a failed start."""
METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache": "vllm:kv_cache_usage_perc",
    "tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Sample:
    """Measurements from outside at one moment."""

    seconds: float
    """Seconds of `time.monotonic`."""
    rss: dict[str, int]
    """Bytes by process: `server`, then its children in order of birth."""
    files: int
    """Open file descriptors of all of them."""
    metrics: dict[str, float]
    """Values of /metrics, by the keys of `METRICS`; missing ones are 0."""
    others: float
    """Cores busy with other processes since the last sample."""

    @property
    def total_rss(self) -> int:
        """Bytes of all processes; pages they share count in each."""
        return sum(self.rss.values())


def read_metrics(text: str) -> dict[str, float]:
    """Convert Prometheus text to the figures of `METRICS`, each summed over its labels."""
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return {key: sums[name] for key, name in METRICS.items()}


@dataclass
class SoakServer:
    """A server: call `start`, then `sample` as often as wanted, then `stop`."""

    command: list[str]
    log: Path
    environment: dict[str, str]
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    _busy: tuple[float, float, float] | None = None
    children: dict[int, psutil.Process] = field(default_factory=dict)

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            RuntimeError: it did not start; the message has the end of its log.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *self.command]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                # A Ctrl-C at the terminal is for the soak, which then ends the server itself.
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:  # such as the Ctrl-C that the server does not get
            self.stop(END_S)
            raise

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def processes(self) -> list[psutil.Process]:
        """Return the server and all processes that it started and that are alive."""
        assert self.process is not None
        try:
            server = psutil.Process(self.process.pid)
            family = [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.children |= {process.pid: process for process in family[1:]}
        return family

    def sample(self, metrics_text: str) -> Sample:
        """Measure memory, files and load now, and add what /metrics said."""
        rss, files, own = {}, 0, 0.0
        for number, process in enumerate(self.processes()):
            try:
                with process.oneshot():
                    name = "server" if number == 0 else f"{process.name()} {process.pid}"
                    rss[name] = process.memory_info().rss
                    files += process.num_fds()
                    own += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        now, cpu = time.monotonic(), psutil.cpu_times()
        busy = sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0)
        before, self._busy = self._busy, (now, busy, own)
        others = 0.0
        if before is not None:
            others = ((busy - before[1]) - (own - before[2])) / (now - before[0])
        return Sample(now, rss, files, read_metrics(metrics_text), max(0.0, others))

    def stop(self, patience: float) -> tuple[float | None, int | None, int]:
        """Send Ctrl-C. Returns seconds (None: killed), exit code, and the number of survivors.

        Survivors are killed once they are counted, so that no process is left.
        """
        assert self.process is not None
        self.processes()
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        seconds = None
        try:
            self.process.wait(patience)
            _, left = psutil.wait_procs(list(self.children.values()), timeout=patience)
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            left = psutil.wait_procs(list(self.children.values()), timeout=1)[1]
        for process in left:
            process.kill()
        return seconds, self.process.returncode, len(left)
