"""vLLM as the gate sees an engine, and the process's side of one that runs in a child."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__
from vllm_dflash.tools.engine_process import SECONDS_TO_CLOSE
from vllm_dflash.tools.verify.gate_engine import Facts, Finished, Request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

SPEC_METRICS = "vllm:spec_decode_num_"


class VllmEngine:
    """Steps vLLM by hand, so that concurrency is exact. Needs its statistics for `counts`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[str, tuple[int, Request]] = {}
        self._concurrency = 1

    def facts(self) -> Facts:
        """See `Engine`."""
        import torch
        import vllm
        from vllm import SamplingParams

        config = self._engine.vllm_config
        processor = self._engine.input_processor
        params = SamplingParams()
        params.update_from_generation_config(
            processor.generation_config_fields, processor.renderer.get_eos_token_id()
        )
        drafter = None
        if config.speculative_config is not None:
            ours = config.parallel_config.worker_cls.startswith("vllm_dflash.")
            drafter = f"vllm-dflash {__version__}" if ours else f"vLLM {vllm.__version__}"
        return Facts(
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            stop_tokens=sorted(params.all_stop_token_ids),
            drafter=drafter,
            versions={
                "vllm-dflash": __version__,
                "vllm": vllm.__version__,
                "torch": torch.__version__,
            },
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Engine`."""
        tokenizer = self._engine.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    def decode(self, tokens: list[int]) -> list[str]:
        """See `Engine`."""
        tokenizer = self._engine.get_tokenizer()
        return [tokenizer.decode([token]) for token in tokens]

    def submit(self, requests: Sequence[Request], concurrency: int) -> None:
        """See `Engine`."""
        assert not self._waiting
        assert not self._running
        self._waiting.extend(enumerate(Request(*one) for one in requests))
        self._concurrency = concurrency

    def advance(self, seconds: float) -> list[Finished]:
        """See `Engine`."""
        deadline = time.monotonic() + seconds
        finished: list[Finished] = []
        while (self._waiting or self._running) and time.monotonic() < deadline:
            while self._waiting and len(self._running) < self._concurrency:
                self._add(*self._waiting.popleft())
            for output in self._engine.step():
                if output.finished:
                    finished.append(self._finish(output))
        return finished

    def counts(self) -> dict[str, float]:
        """See `Engine`."""
        return {
            metric.name.removeprefix(SPEC_METRICS): metric.value
            for metric in self._engine.get_metrics()
            if metric.name.startswith(SPEC_METRICS) and hasattr(metric, "value")
        }

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.engine_core.shutdown(timeout=SECONDS_TO_CLOSE)

    def _add(self, number: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprob_token_ids=None if request.scored is None else [request.scored],
        )
        name = str(next(self._names))
        self._running[name] = number, request
        self._engine.add_request(name, {"prompt_token_ids": list(request.tokens)}, params)

    def _finish(self, output: RequestOutput) -> Finished:
        number, request = self._running.pop(output.request_id)
        completion = output.outputs[0]
        regret = None if request.scored is None else _regret(completion, request.scored)
        return Finished(number, list(completion.token_ids), regret)


def _regret(completion: CompletionOutput, token: int) -> float:
    """Of a token as the first one. The likeliest token is always among those that are listed."""
    assert completion.logprobs is not None
    first = completion.logprobs[0]
    return max(one.logprob for one in first.values()) - first[token].logprob


class Answers:
    """What can be asked of a child: `Engine`, with values that JSON can hold."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.encode = engine.encode
        self.decode = engine.decode
        self.submit = engine.submit
        self.advance = engine.advance
        self.counts = engine.counts
        self.close = engine.close

    def facts(self) -> dict[str, Any]:
        """See `Facts`."""
        return asdict(self._engine.facts())


def start(
    target: str, speculative_config: dict[str, Any] | None, dtype: str | None, flags: list[str]
) -> Answers:
    """An engine in this process, with flags of `vllm serve`; those of its server mean nothing.

    Raises:
        SystemExit: a flag is unknown.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parsed = parser.parse_args(flags)
    speculative = (parsed.speculative_config, parsed.spec_method, parsed.spec_model)
    if parsed.model_tag not in (None, target) or any(one is not None for one in speculative):
        parser.error("the target and the speculative config are not among the flags after --")
    arguments = EngineArgs.from_cli_args(parsed)
    arguments.model = target
    arguments.speculative_config = speculative_config
    arguments.disable_log_stats = False
    if dtype is not None:
        arguments.dtype = dtype
    # As a server, whose batches are of other sizes than those of `LLM`.
    context = UsageContext.OPENAI_API_SERVER
    return Answers(VllmEngine(LLMEngine.from_engine_args(arguments, context)))
