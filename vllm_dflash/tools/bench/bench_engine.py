"""The questions a benchmark asks of an engine, and the process that answers them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.bench.draft_time import read_drafting, watch_drafting
from vllm_dflash.tools.bench.loads.closed import measure_closed
from vllm_dflash.tools.bench.loads.poisson import measure_poisson
from vllm_dflash.tools.bench.loads.swing import measure_swing
from vllm_dflash.tools.engine_process import SECONDS_TO_CLOSE, EngineChild

if TYPE_CHECKING:
    from vllm import LLM

SPEC_METRICS = "vllm:spec_decode_num_"


class BenchChild(EngineChild):
    """An engine with these arguments of `LLM`; `plugins=""` leaves vllm-dflash out.

    `variables` are of its environment.
    """

    def __init__(
        self,
        log: Path,
        *,
        plugins: str | None = None,
        variables: Mapping[str, str] | None = None,
        **engine_arguments: Any,
    ) -> None:
        # Several live side by side.
        environment = (
            {} if "VLLM_CPU_KVCACHE_SPACE" in os.environ else {"VLLM_CPU_KVCACHE_SPACE": "1"}
        )
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        environment |= variables or {}
        super().__init__(f"{__name__}:start", engine_arguments, log, environment=environment)


def start(**engine_arguments: Any) -> Answers:
    """An engine in this process."""
    from vllm import LLM

    return Answers(LLM(**engine_arguments))


class Answers:
    """What can be asked of a child: each public method is a question."""

    def __init__(self, llm: LLM) -> None:
        from vllm_dflash.tools.bench.stepped import VllmEngine

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

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=SECONDS_TO_CLOSE)

    def _counts(self) -> dict[str, float]:
        counts = {
            metric.name.removeprefix(SPEC_METRICS): metric.value
            for metric in self._llm.get_metrics()
            if metric.name.startswith(SPEC_METRICS) and hasattr(metric, "value")
        }
        if self._watching:
            counts["calls"], counts["seconds"] = self._llm.collective_rpc(read_drafting)[0]
        return counts
