"""The commands' interface to an engine: starting it, and every question it answers.

An `EngineAnswers` is used in the engine's own process, or from another one through
`EngineProcess`. Arguments and results are therefore JSON values; tuples arrive as lists.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

from vllm_dflash import __version__
from vllm_dflash.tools.by_step import write_by_step
from vllm_dflash.tools.loads import measure_answers, measure_closed
from vllm_dflash.tools.stepped_engine import Output, SteppedEngine

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

SPEC_METRICS = "vllm:spec_decode_num_"
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_CLOSE = 30.0
"""For an engine's processes. vLLM's limit is 5 s; those it kills leave shared memory behind."""


class Facts(TypedDict):
    """Facts about an engine."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    cache_tokens: int
    """Tokens that the KV cache holds, if all layers are of one kind."""
    stop_tokens: list[int]
    """Tokens that end a text."""
    has_chat_template: bool
    drafter: str | None
    """The package that drafts, and its version; None without speculative decoding."""
    versions: dict[str, str]


class Request(NamedTuple):
    """Tokens to continue greedily."""

    tokens: Sequence[int]
    max_tokens: int
    scored: int | None = None
    """A token whose regret as the next one to report."""


class Finished(NamedTuple):
    """A finished request."""

    number: int
    """Its index among the submitted requests, from 0."""
    tokens: list[int]
    """New tokens, including the stop token if there is one."""
    regret: float | None
    """Regret of the request's `scored` token, in nat."""


class EngineAnswers(SteppedEngine):
    """An engine's answers: each public method is a question. Subclasses answer more."""

    closed, answers = measure_closed, measure_answers

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[str, Request] = {}
        self._concurrency = 1
        self._steps: Iterator[list[str]] = iter(())

    @classmethod
    def start(cls, model: str, flags: list[str] | None = None, **arguments: Any) -> Self:
        """Start an engine for a target in this process. `arguments`: more engine arguments of vLLM.

        If `flags` is given, even empty, the engine is set up as `vllm serve` with these flags would
        do it, so its default batch sizes differ from those of `LLM`, and it keeps statistics. Flags
        of the HTTP server have no effect.

        Raises:
            SystemExit: a flag is unknown.
        """
        if flags is not None:
            return cls(_start_server(flags, {"model": model, **arguments}))
        from vllm import LLM

        return cls(LLM(model, **arguments).llm_engine)

    def facts(self) -> Facts:
        """Return facts about the engine."""
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
            cache_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
            stop_tokens=sorted(params.all_stop_token_ids),
            has_chat_template=bool(getattr(processor.tokenizer, "chat_template", None)),
            drafter=drafter,
            versions={
                "vllm-dflash": __version__,
                "vllm": vllm.__version__,
                "torch": torch.__version__,
            },
        )

    def encode(self, texts: list[str], template: dict[str, Any] | None = None) -> list[list[int]]:
        """Tokenize each text as a prompt.

        If `template` is given, each text is a user's message, to which the chat template is applied
        as a server does it, with `template` as extra arguments.

        Raises:
            ValueError: the target has no chat template.
        """
        if template is None:
            tokenizer = self._engine.get_tokenizer()
            return [list(tokenizer.encode(text)) for text in texts]
        from vllm.renderers import ChatParams

        renderer = self._engine.renderer
        chat = ChatParams(chat_template_kwargs={"add_generation_prompt": True, **template})
        tokenized = replace(renderer.default_chat_tok_params, max_total_tokens=None)  # any length
        messages: Any = [[{"role": "user", "content": text}] for text in texts]
        _, prompts = renderer.render_chat(messages, chat, tokenized)
        return [list(prompt["prompt_token_ids"]) for prompt in prompts]

    def decode(self, tokens: list[int]) -> list[str]:
        """Return the text of each token."""
        tokenizer = self._engine.get_tokenizer()
        return [tokenizer.decode([token]) for token in tokens]

    def dflash_stats(self) -> list[dict[str, Any]]:
        """Return each worker's counters since the engine started. Other engines crash on this."""
        return self._engine.collective_rpc("dflash_stats")

    def counts(self) -> dict[str, float]:
        """Return vLLM's counters of speculative decoding since the engine started.

        drafts (a request's steps that verified any), draft_tokens, accepted_tokens. Empty without
        speculative decoding. Needs an engine with statistics.
        """
        return {
            metric.name.removeprefix(SPEC_METRICS): metric.value
            for metric in self._engine.get_metrics()
            if metric.name.startswith(SPEC_METRICS) and hasattr(metric, "value")
        }

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.engine_core.shutdown(timeout=SECONDS_TO_CLOSE)

    def submit(self, requests: Sequence[Request], concurrency: int) -> None:
        """Queue requests, to run `concurrency` at a time. Earlier ones must be finished."""
        assert not self._waiting
        assert not self._running
        self._waiting.extend(enumerate(Request(*one) for one in requests))
        self._concurrency = concurrency

    def advance(self, seconds: float) -> list[Finished]:
        """Run for about this long or until all requests are done. Returns those that finished."""
        deadline = time.monotonic() + seconds
        finished: list[Finished] = []
        while (self._waiting or self._running) and time.monotonic() < deadline:
            while self._waiting and len(self._running) < self._concurrency:
                number, one = self._waiting.popleft()
                self._running[str(number)] = one
                scored = {} if one.scored is None else {"logprob_token_ids": [one.scored]}
                self.add(str(number), one.tokens, one.max_tokens, whole=True, **scored)
            for output in self.step():
                token = self._running.pop(output.request_id).scored
                regret = None if token is None else _regret(output, token)
                finished.append(Finished(int(output.request_id), list(output.token_ids), regret))
        return finished

    def generate(
        self,
        prompts: list[str],
        tokens: int,
        concurrency: int | None = None,
        template: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continue prompts greedily. Returns token ids, throughput, and the increase of `counts`.

        `concurrency`: prompts at a time (default: all). `template`: see `encode`. Needs an engine
        with statistics.
        """
        requests = [Request(one, tokens) for one in self.encode(prompts, template)]
        before, started = self.counts(), time.perf_counter()
        token_ids = [one.tokens for one in complete(self, requests, concurrency or len(requests))]
        seconds, after = time.perf_counter() - started, self.counts()
        return {
            "token_ids": token_ids,
            "tokens_per_second": sum(map(len, token_ids)) / seconds,
            "counts": {name: after[name] - before[name] for name in after},
        }

    def begin_text(self, prompt: str, tokens: int, template: dict[str, Any] | None = None) -> None:
        """Begin a text, to be read with `next_step`. `template`: see `encode`."""
        (encoded,) = self.encode([prompt], template)
        decode = self._engine.get_tokenizer().decode
        self._steps = write_by_step(self, decode, encoded, tokens)

    def next_step(self) -> list[str] | None:
        """Return the next step's texts (see `write_by_step`); None after the last step."""
        return next(self._steps, None)


def _regret(output: Output, token: int) -> float:
    """Return the regret of a token as the first new one, in nat.

    vLLM always lists the likeliest token, too.
    """
    first = output.logprobs[0]
    return max(one.logprob for one in first.values()) - first[token].logprob


def complete(
    engine: EngineAnswers,
    requests: Sequence[Request],
    concurrency: int,
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Finished]:
    """Run requests and return them in the given order. `on_finished` gets the number finished."""
    engine.submit(requests=requests, concurrency=concurrency)
    finished: dict[int, Finished] = {}
    while len(finished) < len(requests):
        done = [Finished(*one) for one in engine.advance(seconds=SECONDS_BETWEEN_LOOKS)]
        finished |= {one.number: one for one in done}
        on_finished(len(finished))
    return [finished[number] for number in range(len(requests))]


def _start_server(flags: list[str], arguments: dict[str, Any]) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_dflash.config.serve_arguments import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.set_defaults(model=None)  # vLLM's default would hide whether it is given
    parsed = parser.parse_args(flags)
    speculative = (parsed.speculative_config, parsed.spec_method, parsed.spec_model)
    other_targets = {parsed.model_tag, parsed.model} - {None, arguments["model"]}
    if other_targets or any(one is not None for one in speculative):
        parser.error("the flags after -- must not set the target or the speculative config")
    parsed.model = arguments["model"]  # set early: offline, vLLM looks up its default at once
    engine = EngineArgs.from_cli_args(parsed)
    for name, value in {"disable_log_stats": False, **arguments}.items():
        setattr(engine, name, value)
    return LLMEngine.from_engine_args(engine, UsageContext.OPENAI_API_SERVER)
