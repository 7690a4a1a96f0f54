"""One vLLM engine in a process of its own, driven by JSON lines on its standard input.

`EngineChild` starts one from a benchmark. Engines of different kinds can live side by side, so
that measurements of them can be interleaved; an idle one waits for its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "models" / "demo"
SPEC_METRICS = "vllm:spec_decode_num_"


def read_prompts(path: Path, count: int) -> list[str]:
    """The first prompts of a JSON-lines file."""
    with path.open() as file:
        return [json.loads(line)["prompt"] for line in file][:count]


def drafter_of(pair: Path) -> dict[str, Any]:
    """The speculative config of a pair's folder."""
    return {"method": "dflash", "model": str(pair / "drafter")}


class EngineChild:
    """An engine with these arguments; `plugins=""` leaves vllm-dflash out."""

    def __init__(self, log: Path, *, plugins: str | None = None, **engine_arguments: Any) -> None:
        environment = dict(os.environ, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(engine_arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, **question: Any) -> Any:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            self._log.write(line)
        raise RuntimeError(f"the engine died; its log is {self._log.name}")

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._log.close()


def watch_drafting(worker: Any) -> None:
    """In a worker: time everything from the sampled tokens to lists of drafts, for any proposer.

    Proposers return lists or tensors; handing a tensor over is part of the time.
    """
    runner = worker.model_runner
    worker.drafting = [0, 0.0]

    def watch(name: str, *, counts: bool) -> None:
        original: Callable[..., Any] = getattr(runner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = original(*arguments, **named)
            worker.drafting[0] += counts
            worker.drafting[1] += time.perf_counter() - started
            return result

        setattr(runner, name, timed)

    watch("propose_draft_token_ids", counts=True)
    watch("_copy_draft_token_ids_to_cpu", counts=False)
    watch("take_draft_token_ids", counts=False)


def read_drafting(worker: Any) -> tuple[int, float]:
    """In a worker: calls and seconds since `watch_drafting`."""
    return tuple(worker.drafting)


def serve(engine_arguments: dict[str, Any]) -> None:
    """Answer until the input ends."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments)
    drafting = "speculative_config" in engine_arguments
    if drafting:
        llm.collective_rpc(watch_drafting)

    def snapshot() -> dict[str, float]:
        counts = {
            metric.name.removeprefix(SPEC_METRICS): metric.value
            for metric in llm.get_metrics()
            if metric.name.startswith(SPEC_METRICS) and hasattr(metric, "value")
        }
        if drafting:
            counts["calls"], counts["seconds"] = llm.collective_rpc(read_drafting)[0]
        return counts

    for line in sys.stdin:
        question = json.loads(line)
        before = snapshot()
        started = time.perf_counter()
        outputs = llm.generate(
            question["prompts"], SamplingParams(**question["sampling"]), use_tqdm=False
        )
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        after = snapshot()
        answer = {
            "token_ids": token_ids,
            "tokens_per_second": sum(map(len, token_ids)) / seconds,
            "counts": {name: after[name] - before[name] for name in after},
        }
        print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
