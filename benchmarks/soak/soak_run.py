"""Run a soak: a server, its clients, measurements, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from soak.checks import (
    Check,
    Limits,
    check_answers,
    check_end,
    check_growth,
    check_idle,
    check_outcomes,
    check_speed,
    first_and_last_third,
    memory_growth,
    rates,
)
from soak.clients import (
    PATIENCE_S,
    Tally,
    ask_again,
    ask_every_length,
    connected,
    fixed_answer,
    run_clients,
)
from soak.soaked_server import Sample, SoakServer, read_metrics
from vllm_dflash.tools.prompts import read_prompts

IDLE_S = 60
"""Seconds for the engine to finish what the clients left."""


@dataclass(frozen=True)
class Settings:
    """What to soak, and for how long."""

    pair: Path
    prompts: Path
    out: Path
    minutes: float = 10.0
    clients: int = 32
    plain: bool = False
    """vLLM without a drafter, to compare."""
    max_model_len: int = 512
    max_rows: int = 256
    """Most rows of a step (`--max-num-batched-tokens`): oneDNN keeps kernels for each number."""
    sample_every: float = 2.0
    arguments: tuple[str, ...] = ()
    """More arguments of `vllm serve`."""
    limits: Limits = field(default_factory=lambda: Limits(growth=2.0, slowdown=1.3, shutdown=30.0))

    def command(self) -> list[str]:
        """Return the arguments of `vllm serve`.

        float32, or greedy answers may differ between batches by rounding. Sequences and cache
        blocks are so few that requests wait and are preempted.
        """
        command = [str(self.pair / "target"), "--dtype", "float32"]
        command += ["--max-model-len", str(self.max_model_len), "--block-size", "32"]
        command += ["--max-num-seqs", str(max(2, 3 * self.clients // 4))]
        command += ["--max-num-batched-tokens", str(self.max_rows)]
        blocks_of_a_request = self.max_model_len // 32 + 1
        command += [
            "--num-gpu-blocks-override",
            str(blocks_of_a_request * (2 + self.clients // 16)),
        ]
        if not self.plain:
            command += ["--speculative-config.method=dflash"]
            command += [f"--speculative-config.model={self.pair / 'drafter'}"]
        return [*command, *self.arguments]


@dataclass
class Soaked:
    """The results of a soak."""

    settings: Settings
    tally: Tally
    samples: list[Sample]
    answers: list[str]
    """Answers to the fixed prompt: before, during, after."""
    checks: list[Check]
    started: float
    """`time.monotonic` when the clients began."""
    figures: dict[str, Any]

    @property
    def held(self) -> bool:
        """Whether all checks held."""
        return all(check.held for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON. Times are seconds since the clients began."""
        return {
            "held": self.held,
            "checks": [asdict(check) for check in self.checks],
            "settings": {**asdict(self.settings), "command": self.settings.command()},
            "figures": self.figures,
            "outcomes": self.tally.outcomes,
            "faults": self.tally.faults[:100],
            "answers": Counter(self.answers),
            "samples": [
                {**asdict(sample), "seconds": sample.seconds - self.started}
                for sample in self.samples
            ],
            "streams": [
                [moment - self.started, gap]
                for moment, gap in zip(self.tally.gap_times, self.tally.gaps, strict=True)
            ],
        }


Tell = Callable[[float, Tally, Sample | None], None]
"""Progress: seconds since the clients began, their tally, the last sample."""


def soak(settings: Settings, tell: Tell = lambda seconds, tally, sample: None) -> Soaked:
    """Run the soak. Raises `RuntimeError` if the server does not start."""
    # As users run it: an engine in its own process, whatever this process was told.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    # Clients end idle connections: a request that is sent while the server ends one is lost.
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(10 * PATIENCE_S)
    if settings.plain:
        environment["VLLM_PLUGINS"] = ""
    server = SoakServer(settings.command(), settings.out / "server.log", environment)
    server.start()
    try:
        seen = asyncio.run(_drive(server, settings, tell))
        # Read before the shutdown, in which vLLM may report its own engine as dead.
        traceback = "Traceback" in server.log.read_text()
    finally:
        end = server.stop(settings.limits.shutdown)
    seen.checks += check_end(*end, traceback, settings.limits)
    return seen


async def _drive(server: SoakServer, settings: Settings, tell: Tell) -> Soaked:
    prompts = read_prompts(settings.prompts)
    fixed, tally, samples = prompts[0], Tally(), list[Sample]()
    async with connected(server.url) as http:
        await ask_every_length(http, min(settings.max_rows, settings.max_model_len - 1))
        answers = [await fixed_answer(http, fixed)]
        started = time.monotonic()
        until = started + 60 * settings.minutes

        async def watch() -> None:
            while True:
                samples.append(await _sample(server, http))
                tell(time.monotonic() - started, tally, samples[-1])
                await asyncio.sleep(settings.sample_every)

        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(
                run_clients(
                    server.url, settings.clients, prompts, settings.max_model_len, until, tally
                ),
                ask_again(server.url, fixed, until, max(1.0, settings.minutes), answers),
            )
        finally:
            watching.cancel()
        idle = await _until_idle(server, http)
        answers.append(await fixed_answer(http, fixed))
        samples.append(await _sample(server, http))
    checks, figures = _judge(settings, tally, samples, (started, until))
    checks += [check_idle(idle), check_answers(answers[0], answers[1:])]
    return Soaked(settings, tally, samples, answers, checks, started, figures)


async def _sample(server: SoakServer, http: httpx.AsyncClient) -> Sample:
    try:
        text = (await http.get("/metrics")).text
    except httpx.HTTPError:
        text = ""  # the clients' faults report it
    return server.sample(text)


async def _until_idle(server: SoakServer, http: httpx.AsyncClient) -> dict[str, float]:
    """Return what still runs, waits or is held after clients have left and the engine had time."""
    deadline = time.monotonic() + IDLE_S
    while True:
        try:
            metrics = read_metrics((await http.get("/metrics")).text)
        except httpx.HTTPError:
            return {"unreachable": 1.0}
        left = {name: metrics[name] for name in ("running", "waiting", "kv_cache")}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.5)


def _judge(
    settings: Settings, tally: Tally, samples: list[Sample], window: tuple[float, float]
) -> tuple[list[Check], dict[str, Any]]:
    times = [sample.seconds for sample in samples]
    during = [sample for sample in samples if window[0] <= sample.seconds <= window[1]]
    seconds = [sample.seconds for sample in during]
    memory = [sample.total_rss for sample in during]
    growth = memory_growth(seconds, memory)
    tokens_per_second = rates(seconds, [sample.metrics["tokens"] for sample in during])
    latencies = first_and_last_third(tally.gap_times, tally.gaps, *window)
    throughputs = first_and_last_third(seconds[1:], tokens_per_second, *window)
    last = samples[-1].metrics
    figures = {
        "minutes": (times[-1] - window[0]) / 60,
        "requests": tally.total,
        "tokens": last["tokens"] - samples[0].metrics["tokens"],
        "preemptions": last["preemptions"],
        "drafted": last["drafted"],
        "accepted": last["accepted"],
        "growth_mib_per_minute": growth,
        "rss_first_mib": memory[0] / (1 << 20),
        "rss_middle_mib": memory[len(memory) // 2] / (1 << 20),
        "rss_last_mib": memory[-1] / (1 << 20),
        "files_first": during[0].files,
        "files_last": samples[-1].files,
        "latency_thirds_s": latencies,
        "tokens_per_second_thirds": throughputs,
        "other_processes_cores_thirds": first_and_last_third(
            seconds, [sample.others for sample in during], *window
        ),
    }
    checks = check_outcomes(tally.outcomes, tally.faults)
    checks.append(check_growth(growth, settings.limits))
    return checks + check_speed(latencies, throughputs, settings.limits), figures
