"""One vLLM engine in a process of its own, driven by JSON lines over a pair of pipes.

Engines of different kinds can so live side by side, and measurements of them be interleaved; an
idle one waits for its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_dflash.bench.draft_time import read_drafting, watch_drafting
from vllm_dflash.bench.loads.closed import measure_closed
from vllm_dflash.bench.loads.poisson import measure_poisson
from vllm_dflash.bench.loads.swing import measure_swing

if TYPE_CHECKING:
    from vllm import LLM

SPEC_METRICS = "vllm:spec_decode_num_"
LINES_OF_LOG = 15
SECONDS_TO_LEAVE = 60


class EngineDied(RuntimeError):
    """A child ended before it answered. The message holds the end of its log."""

    def __init__(self, log: Path) -> None:
        last = log.read_text(errors="replace").splitlines()[-LINES_OF_LOG:]
        super().__init__("\n".join([f"an engine died; the end of its log, {log}:", *last]))


class EngineChild:
    """An engine with these arguments; `plugins=""` leaves vllm-dflash out."""

    def __init__(self, log: Path, *, plugins: str | None = None, **engine_arguments: Any) -> None:
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._answering = False
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(engine_arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                # A group of its own: Ctrl-C is for the benchmark, which ends its children.
                start_new_session=True,
            )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Send a question (a method of `Answers`) and wait for its answer.

        The first one waits until the engine has started.

        Raises:
            EngineDied: there will be no answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answering = True
        with contextlib.suppress(BrokenPipeError):  # dead already: there is no answer either
            self._process.stdin.write(json.dumps([question, arguments]) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineDied(self._log)
        self._answering = False
        return json.loads(answer)

    def dismiss(self) -> None:
        """It may leave. Several can do so at the same time; `__exit__` waits for each."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()
        if self._answering:  # nobody waits for the answer any more
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_LEAVE)
        # vLLM's own processes outlive a child that could not take leave of them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Answers:
    """What can be asked of a child: each public method is a question."""

    def __init__(self, llm: LLM) -> None:
        from vllm_dflash.bench.vllm_engine import VllmEngine

        self._llm = llm
        self._engine = VllmEngine(llm)
        self._watching = False

    def versions(self) -> dict[str, str]:
        """Of what this engine is made of."""
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of our worker since the engine started; others have none and die."""
        return self._llm.collective_rpc("dflash_stats")[0]

    def closed(self, **load: Any) -> dict[str, Any]:
        """See `measure_closed`."""
        return measure_closed(self._engine, **load)

    def swing(self, **load: Any) -> dict[str, Any]:
        """See `measure_swing`."""
        return measure_swing(self._engine, **load)

    def poisson(self, **load: Any) -> dict[str, Any]:
        """See `measure_poisson`."""
        return measure_poisson(self._engine, **load)

    def watch_drafting(self) -> None:
        """From now on `generate` counts calls and seconds of draft steps, too."""
        self._llm.collective_rpc(watch_drafting)
        self._watching = True

    def generate(self, prompts: list[str], sampling: dict[str, Any]) -> dict[str, Any]:
        """The tokens of these prompts, their throughput, and what vLLM counted meanwhile.

        Needs an engine with `disable_log_stats=False`.
        """
        from vllm import SamplingParams

        before = self._counts()
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        after = self._counts()
        return {
            "token_ids": token_ids,
            "tokens_per_second": sum(map(len, token_ids)) / seconds,
            "counts": {name: after[name] - before[name] for name in after},
        }

    def _counts(self) -> dict[str, float]:
        counts = {
            metric.name.removeprefix(SPEC_METRICS): metric.value
            for metric in self._llm.get_metrics()
            if metric.name.startswith(SPEC_METRICS) and hasattr(metric, "value")
        }
        if self._watching:
            counts["calls"], counts["seconds"] = self._llm.collective_rpc(read_drafting)[0]
        return counts


def serve(engine_arguments: dict[str, Any]) -> None:
    """Answer until the input ends."""
    # What vLLM prints goes to the log. Processes it spawns do not inherit the duplicate, so the
    # end of the answers' pipe tells the benchmark that this process died.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from vllm import LLM

    known = Answers(LLM(**engine_arguments))
    for line in sys.stdin:
        question, arguments = json.loads(line)
        answer = getattr(known, question)(**arguments)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
