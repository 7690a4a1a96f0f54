"""Tensor parallelism: one engine's text and acceptance, decided once, and nothing left behind."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from support.engines import DEMO, DFLASH, DRAFTER, TARGET, engine, greedy, held_out_prompts
from support.pairs import Pair, drafter_config, make_pair
from support.ranks import draft_on_ranks
from vllm_dflash.checkpoint.ranks import describe_ranks, drafter_ranks, undivided
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.thread_binding import Core, binding_fault, divide_cores
from vllm_dflash.model.reference import draft
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.compare_sides import Comparison
from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.parity.check import check_parity
from vllm_dflash.tools.verify.divergence import Text, compare_all
from vllm_dflash.tools.verify.gate import Judge

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
POLICIES = ("fixed", "erratic", "planned")
PROMPTS = held_out_prompts(8)
TOKENS = 40
ROUNDING = 1e-3
"""Nat. Ranks add up their parts in another order than one rank does; in float32 that is all."""


@dataclass
class Run:
    """What an engine did under each policy."""

    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    steps: dict[str, list[list[int]]] = field(default_factory=dict)
    """Tokens that each step brought each prompt."""
    written_down: dict[str, list[Any]] = field(default_factory=dict)
    """By each rank."""
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank, in the end."""
    sampled_tokens: int = 0
    """Written at temperature 1, half of them by a seed."""
    costs: list[Any] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)


def work(llm: LLM) -> Run:
    run = Run(costs=llm.collective_rpc("profiled_costs"))
    engine = llm.llm_engine
    for policy in POLICIES:
        llm.collective_rpc("draft_by", args=(policy,))
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(f"{policy} {number}", prompt, greedy(TOKENS))
        texts: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
        steps: dict[int, list[int]] = {number: [] for number in texts}
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id.split()[1])
                tokens = list(output.outputs[0].token_ids)
                if new := len(tokens) - len(texts[number]):
                    steps[number].append(new)
                texts[number] = tokens
        run.texts[policy], run.steps[policy] = [*texts.values()], [*steps.values()]
        run.written_down[policy] = llm.collective_rpc("written_down")
    run.stats = llm.collective_rpc("dflash_stats")
    llm.collective_rpc("draft_by", args=("fixed",))
    sampled = [
        SamplingParams(temperature=1.0, seed=number if number % 2 else None, max_tokens=20)
        for number in range(len(PROMPTS))
    ]
    run.sampled_tokens = sum(
        len(output.outputs[0].token_ids)
        for output in llm.generate(PROMPTS, sampled, use_tqdm=False)
    )
    run.written_down["sampled"] = llm.collective_rpc("written_down")
    tokenizer = llm.get_tokenizer()
    run.prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    return run


@dataclass
class Both:
    """The same work on one rank and on two."""

    one: Run
    two: Run
    divergences: dict[str, list[list[Any]]]
    """Of two ranks' texts from one rank's, by policy and prompt."""
    left_over: list[str]
    """Processes and shared memory of the two ranks that were there after their engine's end."""


@pytest.fixture(scope="module")
def both() -> Both:
    settings: dict[str, Any] = {
        "speculative_config": DFLASH,
        "worker_extension_cls": "support.watched_worker.Watched",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(BINDING, "nobind")
        environment.setenv("OMP_NUM_THREADS", "1")
        before = set(psutil.Process().children(recursive=True))
        with engine(tensor_parallel_size=2, **settings) as llm:
            started = set(psutil.Process().children(recursive=True)) - before
            # Python's own tracker stays as long as the tests do.
            workers = [one for one in started if "resource_tracker" not in str(one.cmdline())]
            segments = {one for rank in llm.collective_rpc("shared_memory") for one in rank}
            assert len(workers) == 2
            assert any("cpushm" in one for one in segments)
            two = work(llm)
    _, alive = psutil.wait_procs(workers, timeout=10)
    left_over = [str(one) for one in alive] + [one for one in segments if os.path.exists(one)]
    with engine(**settings) as llm:
        one = work(llm)
        answers = EngineAnswers(llm.llm_engine)
        judge = Judge(answers, concurrency=8)
        stop_tokens = {*answers.facts()["stop_tokens"]}
        divergences = {}
        for policy in POLICIES:
            texts = [
                Text(tuple(prompt), tuple(reference), tuple(split), TOKENS)
                for prompt, reference, split in zip(
                    one.prompts, one.texts["fixed"], two.texts[policy], strict=True
                )
            ]
            divergences[policy] = compare_all(texts, stop_tokens, judge.answer)
    return Both(one, two, divergences, left_over)


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_write_what_one_writes(both: Both, policy: str) -> None:
    """The same text up to ties of float32; and where no tie came by, in the same steps."""
    found = both.divergences[policy]
    assert all(one.is_tie(ROUNDING) for text in found for one in text)
    alike = [number for number, text in enumerate(found) if not text]
    assert len(alike) >= len(PROMPTS) - 1
    for number in alike:
        assert both.two.steps[policy][number] == both.one.steps[policy][number]
    accepted = sum(new - 1 for text in both.two.steps[policy] for new in text)
    assert accepted > 2 * len(PROMPTS)  # else steps would be alike whatever was drafted


def without_prices(decided: list[Any]) -> list[Any]:
    """Those come of confidences, which are rounded otherwise on one rank."""
    return [one[:-1] if isinstance(one, tuple) else one for one in decided]


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_made_once(both: Both, policy: str) -> None:
    """Under `erratic` each rank on its own would decide otherwise in every step."""
    (decided, drafted), (elsewhere, also_drafted) = both.two.written_down[policy]
    assert len(decided) > TOKENS // 4
    assert decided == elsewhere
    assert drafted == also_drafted
    assert without_prices(decided) == without_prices(both.one.written_down[policy][0][0])


@pytest.mark.engine
def test_ranks_sample_alike(both: Both) -> None:
    """Each by itself, and what they accept decides what they do next."""
    (decided, drafted), (elsewhere, also_drafted) = both.two.written_down["sampled"]
    assert both.two.sampled_tokens > 10 * len(PROMPTS)
    assert len(decided) > 5
    assert decided == elsewhere
    assert drafted == also_drafted


@pytest.mark.engine
def test_all_ranks_start_from_the_same_costs(both: Both) -> None:
    first, second = both.two.costs
    assert first == second
    assert len(first[0]) > 2


@pytest.mark.engine
def test_the_first_rank_counts(both: Both) -> None:
    """Its counters are those of an engine of one rank; others have the same decisions."""
    (one,), (first, second) = both.one.stats, both.two.stats
    assert (first["rank"], second["rank"]) == (0, 1)
    counters = ("steps", "drafted_steps", "skipped_steps", "probes", "draft_tokens")
    counters += ("accepted_tokens", "draft_lengths", "nan_drafts")
    for name in counters:
        assert first[name] == second[name] == one[name], name
    assert first["nan_drafts"] == 0


@pytest.mark.engine
def test_nothing_is_left_over(both: Both) -> None:
    assert not both.left_over


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    # changes to the drafter, options of ours; key/value heads and MLP rows of each rank
    "split": ({}, {}, (1, 48)),
    "a-key-value-head-for-two-ranks": ({"num_key_value_heads": 1}, {}, (1, 48)),
    "heads-that-do-not-divide": (
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {},
        (3, 96),
    ),
    "an-mlp-that-does-not-divide": ({"intermediate_size": 95}, {}, (2, 95)),
    "whole-as-configured": ({}, {"draft_tensor_parallel_size": 1}, (2, 96)),
    "biases": ({"attention_bias": True}, {}, (1, 48)),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, {}, (1, 48)),
    "sinks-whole": (
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "dflash_config": {"attention_sink_bias": True},
        },
        {},
        (3, 96),
    ),
    "own-small-vocabulary": ({"own_vocabulary": True, "draft_vocab_size": 100}, {}, (1, 48)),
}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Pair, Any, Any]]:
    """What two ranks drafted with each shape: the pair, the contexts, and what each rank told."""
    folder = tmp_path_factory.mktemp("ranks")
    tasks = []
    for name, (changes, options, _) in SHAPES.items():
        pair = make_pair(folder / name, **changes)
        width = len(pair.spec.taps) * pair.spec.target_hidden_size
        generator = torch.Generator().manual_seed(0)
        contexts = [torch.randn(length, width, generator=generator) for length in (3, 41, 70)]
        tasks.append((pair, contexts, options))
    told = draft_on_ranks(folder, tasks, num_ranks=2)
    return {
        name: (pair, contexts, ranks)
        for name, (pair, contexts, _), ranks in zip(SHAPES, tasks, told, strict=True)
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_split_drafter_computes_the_reference(
    of_ranks: dict[str, tuple[Pair, Any, Any]], name: str
) -> None:
    pair, contexts, ranks = of_ranks[name]
    target, reference = pair.load_target(), pair.load_drafter()
    k = pair.spec.max_draft_tokens
    expected = torch.cat(
        [
            draft(target, reference, context, 7 + number, k)
            for number, context in enumerate(contexts)
        ]
    )
    for told in ranks:
        assert (told["kv_heads"], told["mlp_rows"]) == SHAPES[name][2]
        assert (told["logits"] - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert told["drafts"] == reference.target_ids(expected.argmax(-1)).view(3, k).tolist()


def test_which_drafters_are_split() -> None:
    spec = parse_config("it", drafter_config())  # 4 heads, 2 for keys and values, 96 rows
    assert [drafter_ranks(spec, size) for size in (1, 2, 3, 4, 8)] == [1, 2, 1, 4, 1]
    assert undivided(spec, 3) == ["4 attention heads", "2 key/value heads"]
    odd = parse_config("it", drafter_config(intermediate_size=95))
    assert describe_ranks(spec, 2, 2) == "the drafter is split over 2 ranks, like the target"
    assert describe_ranks(odd, 2, 1) == (
        "every one of 2 ranks has the whole drafter (95 rows of its MLP (intermediate_size) do not"
        " divide by 2)"
    )
    assert "(as configured)" in describe_ranks(spec, 2, 1)
    assert drafter_ranks(spec, 2, asked=1) == 1
    with pytest.raises(DrafterError, match=r"is 4, the target's tensor_parallel_size 2: .* 2 or 1"):
        drafter_ranks(spec, 2, asked=4)
    with pytest.raises(DrafterError, match=r"95 rows of its MLP .* Leave it out"):
        drafter_ranks(odd, 2, asked=2)


def engine_args(pair: Pair, **changes: Any) -> EngineArgs:
    config = {"method": "dflash", "model": str(pair.drafter)}
    return EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config=config,
        **changes,
    )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path)


def test_threads_that_cannot_be_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would say so in a process of its own, and not name the variable."""
    from vllm.utils import cpu_resource_utils

    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.delenv(BINDING, raising=False)
    args = engine_args(pair, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=rf"{BINDING}='\d.*\|\d.*' to share .* {BINDING}=nobind"):
        args.create_engine_config()
    monkeypatch.setenv(BINDING, "0|1|2")
    with pytest.raises(ValueError, match=r"'0\|1\|2' has cores for 3"):
        engine_args(pair, tensor_parallel_size=2).create_engine_config()
    monkeypatch.setenv(BINDING, "0|1")
    config = engine_args(pair, tensor_parallel_size=2).create_engine_config()
    assert DFlashOptions.of(config).drafter_ranks == 2
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0, 1])
    monkeypatch.delenv(BINDING)
    engine_args(pair, tensor_parallel_size=2).create_engine_config()


def test_cores_are_shared_out() -> None:
    """No two ranks get threads of one core: 8 logical CPUs, numbered as Linux does, are 4 cores."""
    cores = [Core(cpu, cpu % 4, 0) for cpu in range(8)]
    assert divide_cores(cores, 2) == "0-1|2-3"
    assert divide_cores([Core(cpu, cpu, 0) for cpu in (0, 1, 2, 5, 7)], 2) == "0-1|2,5,7"
    assert divide_cores(cores[:1], 2) is None
    assert binding_fault("auto", 2, 2, cores) is None
    assert binding_fault("nobind", 4, 1, cores) is None
    assert binding_fault("0-3", 1, 1, cores) is None
    assert "asks for 1 ranks" in (binding_fault("0|1", 1, 1, cores) or "")
    assert "here are 1. Set VLLM_CPU_OMP_THREADS_BIND='0-1|2-3'" in (
        binding_fault("auto", 2, 1, cores) or ""
    )
    assert (binding_fault("auto", 2, 1, cores[:1]) or "").endswith(
        "here are 1. Set VLLM_CPU_OMP_THREADS_BIND=nobind to leave threads unbound."
    )


def test_parity_takes_one_rank(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2.*leave it out.*verify .*-- -"):
        check_parity(str(pair.drafter), str(pair.target), tensor_parallel_size=2)


def test_bench_gives_every_engine_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Comparison] = []
    monkeypatch.setattr(Comparison, "run", lambda self: asked.append(self) or [])
    arguments = ["bench", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    arguments += ["--prompts", str(DEMO / "held_out.jsonl"), "--tensor-parallel-size", "2"]
    arguments += ["--out", str(tmp_path)]
    monkeypatch.setenv(BINDING, "0")
    assert cli.main(arguments) == 1
    assert f"{BINDING}='0' has cores for 1. Set" in capsys.readouterr().err
    assert not asked
    monkeypatch.setenv(BINDING, "nobind")
    assert cli.main(arguments) == 0
    assert asked[0].engine["tensor_parallel_size"] == 2
