"""`benchmarks/parity` on real engines: a clean pair, and planted faults that it must locate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from torch import float32
from vllm import LLM

from parity.check import engine_arguments, record_prompts
from parity.compare_recordings import compare
from parity.oracle import Oracle
from parity.parity_report import stage_names
from parity.recorded_answers import RecordedAnswers
from support import DEMO
from support.engines import (
    USES_V2,
    engine,
    held_out_prompts,
    proposer_of,
    slow_on_v2,
    target_of,
)
from support.pairs import drafter_config, save_drafter
from support.targets import make_target
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.progress import Progress

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS = [[(7 * row + 3 * i) % 300 for i in range(length)] for row, length in enumerate((9, 50))]
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
TOKENS = 8 if USES_V2 else 32


@pytest.mark.parametrize(
    "name",
    ["drafter", *(pytest.param(n, marks=slow_on_v2) for n in ("drafter2", "lilicorr"))],
)
def test_a_clean_pair(runner: str, tmp_path: Path, name: str) -> None:
    """The pair is trained, so that drafts are accepted and differ at every step."""
    target, drafter = str(DEMO / "target"), str(DEMO / name)
    with engine(**engine_arguments(drafter, target, "float32", 512)) as llm:
        answers = RecordedAnswers(llm.llm_engine)
        with pytest.raises(ValueError, match=r"prompt 2 has 510 tokens.*the engine takes 512"):
            record_prompts(answers, [[1], [1] * 510], TOKENS, tmp_path)
        assert not list(tmp_path.iterdir())
        progress = StringIO()
        recordings = record_prompts(
            answers, held_out_prompts(2), TOKENS, tmp_path, Progress(progress)
        )
    assert "generating: 2 prompts" in progress.getvalue()
    report = compare(recordings, Oracle.load(target, drafter, float32))
    assert report.is_equal
    assert report.culprit is report.cause is None
    assert report.runner == runner
    assert report.nan_drafts == 0
    stages = {stage.name: stage for stage in report.stages}
    assert max(max(stage.alone, stage.end_to_end) for stage in stages.values()) <= 1e-4
    # Two implementations never round alike: these were really compared.
    assert min(stages[name].alone for name in ("tap of layer 4", "context Z", "layer 2")) > 0
    assert len(report.acceptance) == 2
    for prompt in report.acceptance:
        assert prompt.engine == prompt.reference
        # All tokens except the first, and except a last one after an undrafted step. On V2 the last
        # step has drafts as well, and its bonus token may be one too many.
        assert TOKENS - 2 <= sum(prompt.engine) + len(prompt.engine) < TOKENS + USES_V2
    assert sum(sum(prompt.engine) for prompt in report.acceptance) > 0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    """A random Gemma 4 and a random drafter with a sliding and a full layer; tests plant faults."""
    folder = tmp_path_factory.mktemp("faulty")
    make_target(folder / "target", "gemma4")
    # Not the target's base: vLLM makes one rotation for all layers that ask for the same.
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    save_drafter(folder / "drafter", drafter_config(**MIXED, rope_parameters=rope))
    target, drafter = str(folder / "target"), str(folder / "drafter")
    arguments = engine_arguments(drafter, target, "float32", 256)
    with engine(**arguments, skip_tokenizer_init=True) as llm:
        yield folder, llm


def without_embedding_scale(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    vocabulary = proposer_of(llm).model.vocabulary
    right = vocabulary._embed
    monkeypatch.setattr(vocabulary, "_embed", lambda token_ids: right(token_ids) / 64**0.5)


def taps_one_higher(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    model = target_of(llm)
    (tapped,) = (one for one in model.modules() if getattr(one, "aux_hidden_state_layers", ()))
    higher = tuple(tap + 1 for tap in tapped.aux_hidden_state_layers)
    monkeypatch.setattr(tapped, "aux_hidden_state_layers", higher)


def rope_in_pairs(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    attentions = proposer_of(llm).model.context.attentions
    for rope in {attention.rotary_emb for attention in attentions}:  # vLLM makes one for all
        monkeypatch.setattr(rope, "is_neox_style", not rope.is_neox_style)


FAULTS = [
    (without_embedding_scale, "embedding", "the target's embedding or its scale"),
    (taps_one_higher, "tap of layer 0", "taps off by one"),
    (rope_in_pairs, "layer 0", "rope layout, theta or scaling"),
]


@pytest.mark.parametrize(("plant", "culprit", "cause"), FAULTS[2:] if USES_V2 else FAULTS)
def test_a_planted_fault_is_located(
    faulty: tuple[Path, LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch, LLM], None],
    culprit: str,
    cause: str,
) -> None:
    """Stages after the culprit are wrong from end to end, and right by themselves."""
    folder, llm = faulty
    plant(monkeypatch, llm)
    recordings = record_prompts(RecordedAnswers(llm.llm_engine), PROMPTS, TOKENS, tmp_path)
    oracle = Oracle.load(str(folder / "target"), str(folder / "drafter"), float32)
    report = compare(recordings, oracle)
    spec = read_drafter(str(folder / "drafter"))
    assert [stage.name for stage in report.stages] == stage_names(spec)
    assert not report.is_equal
    assert report.culprit == culprit
    assert report.cause is not None
    assert report.cause.startswith(cause)
    stages = {stage.name: stage for stage in report.stages}
    assert stages["logits"].end_to_end > 0.01
    assert stages["logits"].alone < 1e-4
    if culprit != "layer 0":
        assert stages["layer 0"].alone < 1e-4 < stages["layer 0"].end_to_end
