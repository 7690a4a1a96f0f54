"""The trainer of `examples`: it learns, and what it writes is a checkpoint that drafts the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafter_training.acceptance import measure
from drafter_training.blocks import cut_blocks
from drafter_training.first_drafter import (
    begin_as_target,
    drafter_config,
    drafter_of_shape,
    write_drafter,
)
from drafter_training.losses import block_loss
from drafter_training.optimizers import adamw
from drafter_training.sources import Cached
from drafter_training.trainer import Trainer
from packaged_pairs.pair_table import PACKAGED_PAIRS, DrafterShape, PackagedPair
from reference.reference_drafter import ReferenceDrafter
from train_drafter import export
from vllm_dflash.checkpoint.read import read_drafter

PAIRS = [([1, 2, 3], [4, 5, 6, 7, 8]), ([9], [10, 11, 12])]


SHAPE = DrafterShape("target", taps=(0, 1), like=(2,), mask_token_id=16, vocabulary=20)
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def first_drafter(target: PreTrainedModel, text: list[int]) -> ReferenceDrafter:
    drafter = drafter_of_shape(target, SHAPE, torch.arange(0, 40, 2))
    begin_as_target(drafter, target, SHAPE, text)
    return drafter


def make_trainer(target: PreTrainedModel) -> Trainer:
    drafter = first_drafter(target, [*range(1, 40)])
    assert drafter.lm_head is not None
    return Trainer(
        drafter,
        target.get_input_embeddings(),
        drafter.lm_head.weight,
        [adamw([one for one in drafter.parameters() if one.requires_grad])],
        peak=1e-2,
        rows=2,
        anchors=3,
        sizes=(2, 4),
        negatives=8,
        dtype=torch.float32,
        averages=True,
    )


def test_it_learns_a_text_and_drafts_it_in_steps_of_whole_blocks(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    trainer = make_trainer(target)
    pairs = [([2, 6], [4, 8, 10, 12, 14, 16, 18, 20, 22]), ([3, 5], [30, 28, 26, 24])]
    source = Cached(target, [0, 1], tmp_path)
    source.take("texts", pairs)
    for _ in range(150):
        trainer.advance(source, 1.0)
    trainer.drafter.spec = trainer.drafter.spec.model_copy(update={"block_size": 4})
    length, accepted = measure(trainer.drafter, source, trainer.embed, trainer.head, 100)
    assert (length, accepted) == (11 / 3, [1, 1, 1])  # 8 tokens in two steps, 3 in one
    assert measure(trainer.drafter, source, trainer.embed, trainer.head, 3)[0] == 2


def test_what_is_written_is_read_as_a_checkpoint_and_drafts_the_same(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make_trainer(target).drafter
    write_drafter(drafter, drafter_config(target, SHAPE), tmp_path)
    spec = read_drafter(str(tmp_path))
    assert (spec.dialect, spec.taps, spec.draft_vocab_size) == ("speculators", (0, 1), 20)
    loaded = ReferenceDrafter.load(spec, tmp_path).float()
    assert loaded.target_ids(torch.arange(20)).tolist() == [*range(0, 40, 2)]
    blocks = cut_blocks(PAIRS, [[3, 6], [1, 2]], 4, mask_token_id=39)
    features = torch.randn(2, 8, 64)
    hits = []
    for parameter in drafter.parameters():  # not the rotary frequencies, which are computed
        parameter.data = parameter.data.bfloat16().float()
    for one in (drafter, loaded):
        assert one.lm_head is not None
        embed = target.get_input_embeddings()
        hits.append(block_loss(one, blocks, features, embed, one.lm_head.weight, torch.float32))
    assert torch.equal(hits[0][0], hits[1][0])
    assert torch.equal(hits[0][1], hits[1][1])


def test_a_drafter_is_exported_without_the_answers_it_learned_from(tmp_path: Path) -> None:
    target = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    pair = PackagedPair(PACKAGED_PAIRS["smollm2"].packaged, tmp_path, SHAPE)
    target.save_pretrained(pair.target)
    with pytest.raises(SystemExit, match="run this with `train` first"):
        export(pair, tmp_path / "out")
    trainer, folder = make_trainer(target), tmp_path / "training"
    folder.mkdir()
    torch.save(torch.arange(0, 40, 2), folder / "vocabulary.pt")
    trainer.average.norm.weight.data.fill_(0.25)
    trainer.save(folder / "state.pt")
    export(pair, tmp_path / "out")
    loaded = ReferenceDrafter.load(read_drafter(str(tmp_path / "out")), tmp_path / "out")
    assert loaded.norm.weight.unique().tolist() == [0.25]
    assert loaded.target_ids(torch.arange(20)).tolist() == [*range(0, 40, 2)]
