"""A drafter's own tensors: which ids they may refer to, and which tensors are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from support.cached_drafter import Row, check_logits, features_of
from support.drafter_harness import DrafterHarness
from support.pairs import Pair, drafter_config, make_pair
from support.reference_decoding import draft
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.checkpoint.tensors import MASK_EMBEDDING_FILE
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.model import draft_model
from vllm_dflash.model.vocabulary import check_ids

SPEC = parse_config("drafts", drafter_config(draft_vocab_size=4))  # of 320 tokens


def d2t(*ids: int) -> dict[str, torch.Tensor]:
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids))}


EMBEDDING = {"embed_tokens.weight": torch.zeros(320, 64)}


@pytest.mark.parametrize(
    ("tensors", "vocab_size", "words"),
    [
        # A map fits however many padding rows the target has or lacks.
        *((d2t(0, 7, 300, 312), vocab_size, None) for vocab_size in (313, 320, 400)),
        ({}, 313, None),
        (d2t(0, 7, 300, 313), 313, "d2t leads to tokens 0 to 313, and the target has 313 tokens"),
        (d2t(5, -1, 300, 9), 313, "d2t leads to tokens -1 to 300, and the target has 313 tokens"),
        (EMBEDDING, 320, None),
        (EMBEDDING, 312, None),
        (EMBEDDING, 321, "its own embedding has 320 rows, and the target has 321 tokens"),
    ],
)
def test_which_ids_its_own_tensors_may_refer_to(
    tensors: dict[str, torch.Tensor], vocab_size: int, words: str | None
) -> None:
    if words is None:
        check_ids(SPEC, tensors, vocab_size)
        return
    with pytest.raises(DrafterError, match=rf"{words}\. Choose a drafter trained for this target"):
        check_ids(SPEC, tensors, vocab_size)


def spoil(pair: Pair, **tensors: torch.Tensor) -> None:
    file = pair.drafter / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def test_ids_are_checked_as_a_drafter_is_loaded(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, draft_vocab_size=100)
    spoil(pair, d2t=torch.full((100,), 221))  # the last one leads to token 320 of 320
    with pytest.raises(DrafterError, match="d2t leads to tokens 221 to 320, and the target has"):
        DrafterHarness(pair)


def test_an_adaflash_drafter_drafts_without_its_length_head(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, dflash_config={"use_thresh_head_two_model": True})
    head = {"down.weight": (8, 64), "down.bias": (8,), "out.weight": (1, 8), "out.bias": (1,)}
    spoil(pair, **{f"thresh_head_two_model.{name}": torch.ones(of) for name, of in head.items()})
    harness = DrafterHarness(pair)
    features = features_of(pair, 41, seed=0)
    harness.step([Row(0, features, bonus=7)])
    expected = draft(pair.load_target(), pair.load_drafter(), features, 7, 7)
    check_logits(harness.logits, expected)


def test_files_are_those_of_the_revision_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def get(file: str, model: str, revision: str | None = "main") -> bytes | None:
        asked.append((file, model, revision))
        return get_hf_file_bytes(file, model, revision)

    monkeypatch.setattr(draft_model, "get_hf_file_bytes", get)
    pair = make_pair(tmp_path, mask_embedding=True)
    # Named by its URL in object storage; vLLM keeps a local folder of it.
    named = pair.spec.model_copy(update={"model": "s3://bucket/drafter"})
    read = EngineOptions.from_config
    modes = SimpleNamespace(from_config=lambda config: replace(read(config), drafter=named))
    monkeypatch.setattr(draft_model, "EngineOptions", modes)
    DrafterHarness(pair, revision="ours")
    assert asked == [(MASK_EMBEDDING_FILE, str(pair.drafter), "ours")]
