"""vLLM engines in the test process, and the demo pair they serve."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from emulated import torch_cuda
from support import DEMO
from support.interpreter import widen_block_inputs
from support.planner_world import steady_costs
from vllm_dflash.config.engine_options import CPU_WORKER_V1, CPU_WORKER_V2, GPU_WORKER
from vllm_dflash.engine import profile
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.tools.prompts import read_prompts

TARGET, DRAFTER = DEMO / "target", DEMO / "drafter"
USES_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" or torch_cuda.is_installed()
DFLASH = {"method": "dflash", "model": str(DRAFTER)}
FIXED = {**DFLASH, "draft_length": "fixed"}
V2_WORKERS = GPU_WORKER.rpartition(".")[0]
slow_on_v2 = pytest.mark.slow if USES_V2 else pytest.mark.skipif(False, reason="is quick on V1")
"""Mark of tests and parameters that V2's interpreter takes long for; V1 runs them."""
SCHEDULING = ("synchronous", "asynchronous") if USES_V2 else ("synchronous",)
"""Ways to schedule this process's model runner."""

if USES_V2:
    widen_block_inputs()

# Imported objects stay. vLLM searches them for garbage 15 times for each engine that starts and
# ends, which takes ten times as long as all the rest; so they are set aside for good.
gc.collect()
gc.freeze()
for name in ("freeze", "unfreeze"):
    setattr(gc, name, lambda: None)


def held_out_prompts(count: int) -> list[str]:
    return read_prompts(DEMO / "held_out.jsonl", count)


@contextmanager
def engine(scheduling: str = "", /, **arguments: Any) -> Iterator[LLM]:
    """Start an eager float32 engine on the demo target in this process. vLLM schedules it as usual
    here, unless "asynchronous" is asked for."""
    settings = {"model": str(TARGET), "dtype": "float32", "enforce_eager": True}
    settings |= {"max_model_len": 512, "disable_log_stats": False, "seed": 0}
    settings |= {"block_size": 32}  # smaller than the prompts, so that prefixes are cached
    if torch_cuda.is_installed():
        settings["kv_cache_memory_bytes"] = 32 << 20  # that GPU has little memory
    if USES_V2:  # in each step, the interpreter goes through all that there could be
        settings |= {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    if scheduling and current_platform.is_cuda():  # asynchronous by default
        settings["async_scheduling"] = scheduling == "asynchronous"
    cleanup_dist_env_and_memory()
    # Profiles of tests need not be exact.
    with _scheduling(scheduling), mock.patch.object(profile, "SECONDS_PER_CURVE", 0.2):
        llm = LLM(**settings | arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def _scheduling(scheduling: str) -> Iterator[None]:
    """Allow "asynchronous": vLLM switches that off on CPUs, but Model Runner V2 can do it there."""
    check = current_platform.check_and_update_config

    def set_it(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling |= scheduling == "asynchronous"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "check_and_update_config", staticmethod(set_it))
        yield


def fix_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines use fixed step costs instead of measuring, and plan every step, so that draft
    lengths repeat.

    The planner then sees only how drafts are accepted. With the costs of a busy machine or of an
    interpreter, it would rightly draft nothing.
    """
    # By name: on a GPU nothing may import the workers for CPUs.
    kinds = (GPU_WORKER,) if current_platform.is_cuda() else (CPU_WORKER_V1, CPU_WORKER_V2)
    for kind in kinds:
        monkeypatch.setattr(
            f"{kind}.measure", lambda self: steady_costs(self.model_runner.max_num_reqs)
        )
    monkeypatch.setattr(Cadence, "is_due", lambda *_: True)
    monkeypatch.setattr(Cadence, "interval", lambda _: 1)
    # One length for all is worth more than individual ones, wherever there are graphs for it.
    monkeypatch.setattr(
        f"{V2_WORKERS}.ragged_seconds", lambda runner: 1.0 if _has_graphs_of_blocks(runner) else 0.0
    )


def _has_graphs_of_blocks(runner: Any) -> bool:
    """Return whether there is a graph of a batch in which each request has a block's rows."""
    graphs = runner.cudagraph_manager.graphs if runner.cudagraph_manager else ()
    rows = 1 + runner.num_speculative_steps
    return any(graph.uniform_token_count == rows for graph in graphs)


@contextmanager
def with_fixed_costs() -> Iterator[None]:
    """Do the same for engines that start inside."""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        yield


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def proposer_of(llm: LLM) -> Any:
    """Return our proposer, or on Model Runner V2 our speculator."""
    return worker_of(llm).drafter


def scheduler_of(llm: LLM) -> Any:
    """Return the engine's scheduler; on V2 it plans."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: LLM) -> Any:
    """Return the model runner."""
    return worker_of(llm).model_runner


def target_of(llm: LLM) -> Any:
    """Return the target's model."""
    return runner_of(llm).get_model()


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def token_ids(
    llm: LLM, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prefix_cache_hits(llm: LLM) -> int:
    """Return the number of prompt tokens found in the prefix cache so far."""
    (hits,) = (m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
    return hits


def drafter_cache_per_token(llm: LLM) -> int:
    """Return the bytes that vLLM keeps of a token for the drafter's layers."""
    attentions = proposer_of(llm).model.context.attentions
    specs = [one.attn.get_kv_cache_spec(llm.llm_engine.vllm_config) for one in attentions]
    return sum(spec.page_size_bytes // spec.block_size for spec in specs)


def acceptance_by_request(llm: LLM, *, of_drafts: bool = False) -> dict[str, list[int]]:
    """Watch an engine: tokens of each verify step, per request, filled while it generates.
    `of_drafts`: verified drafts instead of tokens."""
    lengths: dict[str, list[int]] = {}

    def count(ids: Sequence[str], produced: Sequence[int], drafts: Sequence[int]) -> None:
        for name, tokens, verified in zip(ids, produced, drafts, strict=True):
            if verified and tokens:
                lengths.setdefault(name, []).append(verified if of_drafts else tokens)

    if not USES_V2:
        statistics = proposer_of(llm).statistics
        record_outcomes = statistics.record_outcomes

        def watched(step: Any) -> None:
            record_outcomes(step)
            count(step.ids, step.produced.tolist(), step.verified.tolist())

        statistics.record_outcomes = watched
        return lengths

    from vllm_dflash.engine.v2.exchange import OUTCOMES, verified_drafts

    scheduler = scheduler_of(llm)
    update = scheduler.update_from_output
    scheduler._cadence.is_due = lambda _: True  # then the outcomes of all steps are reported

    def updated(scheduled: Any, output: Any) -> Any:
        if (table := OUTCOMES.on(output)) is not None:
            count(output.req_ids, [*map(len, output.sampled_token_ids)], verified_drafts(table))
        return update(scheduled, output)

    scheduler.update_from_output = updated
    return lengths


def counted(lengths: list[int], tokens: list[int]) -> list[int]:
    """Return the tokens of each verify step of a request that wrote these tokens.

    V2 verifies as many drafts of a request that is about to end as of others. Tokens after the end
    do not count.
    """
    if not USES_V2:
        return lengths
    steps: list[int] = []
    for length in [*lengths, *[1] * len(tokens)]:
        steps.append(min(length, len(tokens) - 1 - sum(steps)))
    return [length for length in steps if length]


def in_order(of_requests: dict[str, list[int]]) -> list[list[int]]:
    """Return the values of each request, in the order in which requests were added."""
    return [of_requests[name] for name in sorted(of_requests, key=lambda n: int(n.split("-")[0]))]


def nats_behind(llm: LLM, texts: list[list[int]], count: int) -> list[float]:
    """Return how far each of the last `count` tokens of texts is behind an engine's best. Each is
    judged after the tokens really written before it, so one tie excuses one token."""
    requests = [{"prompt_token_ids": text} for text in texts]
    judge = greedy(1, prompt_logprobs=1, detokenize=False)
    return [
        max(one.logprob for one in row.values()) - row[token].logprob
        for text, output in zip(texts, llm.generate(requests, judge, use_tqdm=False), strict=True)
        for token, row in zip(text[-count:], output.prompt_logprobs[-count:], strict=True)
    ]
