"""LiLiCorr's head in plain PyTorch against vLLM's own, and its tensors by name."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.lilicorr import LiLiCorrHead

from reference.reference_lilicorr import ReferenceLattice, walk
from support.pairs import drafter_config, lilicorr_config
from vllm_dflash.checkpoint.names import LATTICE, our_name
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.model.dflash2_layers import walk as walk_of_blocks
from vllm_dflash.model.lilicorr_head import load_head, make_head

WIDTHS: dict[str, dict[str, Any]] = {
    "narrower": {},
    "as-wide": {"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4},
    "one-candidate": {"lilicorr_candidate_topk": 1},
}
OLD_NAMES = {
    "feature_norm.": "feature_mlp.0.",
    "feature_mlp.up_proj.": "feature_mlp.1.",
    "feature_mlp.down_proj.": "feature_mlp.3.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
}
HIDDEN, BLOCKS = 64, 3


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    """vLLM's layers ask for the ranks they are split over."""
    with set_current_vllm_config(VllmConfig()):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/init", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        yield


def drafter_of(
    nested: dict[str, Any],
) -> tuple[DrafterSpec, ReferenceLattice, dict[str, torch.Tensor]]:
    """Return the spec, a random head whose weights all matter, and its checkpoint tensors."""
    spec = parse_config("it", drafter_config(**lilicorr_config(dflash_config=nested)))
    assert spec.lilicorr is not None
    torch.manual_seed(3)
    reference = ReferenceLattice(spec, spec.lilicorr)
    for name, parameter in reference.named_parameters():
        scale = 0.3 if parameter.ndim != 2 else parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.0, scale)
    return spec, reference, {f"{LATTICE}{k}": v for k, v in reference.state_dict().items()}


def inputs(spec: DrafterSpec, positions: int) -> tuple[torch.Tensor, ...]:
    """Return embeddings, log-probabilities, hidden states and newest context, for `scores`."""
    count = spec.num_candidates
    assert count is not None
    log_probs = torch.randn(BLOCKS, positions, 20).log_softmax(-1).topk(count).values
    shapes = (BLOCKS, positions, count, HIDDEN), (BLOCKS, positions, HIDDEN), (BLOCKS, HIDDEN)
    embeddings, hidden, newest = (torch.randn(shape) for shape in shapes)
    return embeddings, log_probs, hidden, newest


def scores_of(head: LiLiCorrHead, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the head's scores, after the processing that vLLM's loader does."""
    for module in head.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
    return head.forward(*given, torch.ones(BLOCKS, dtype=torch.bool))  # without compiling it


@pytest.mark.parametrize("nested", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("positions", [1, 3, 7])
@torch.inference_mode()
def test_the_reference_scores_as_vllm(nested: dict[str, Any], positions: int) -> None:
    """Including blocks that are narrower than it was trained for."""
    spec, reference, tensors = drafter_of(nested)
    assert spec.lilicorr is not None
    head = LiLiCorrHead(
        model_hidden_size=HIDDEN,
        block_size=8,
        rms_norm_eps=1e-6,
        config=lilicorr_config(dflash_config=nested)["dflash_config"],
    )
    parameters = dict(head.named_parameters())
    assert {f"{LATTICE}{name}" for name in parameters} == tensors.keys()
    for name, parameter in parameters.items():
        parameter.copy_(tensors[f"{LATTICE}{name}"])
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    given = inputs(spec, positions)
    scores = reference.scores(*given)
    torch.testing.assert_close(scores, scores_of(head, given), rtol=1e-4, atol=1e-4)
    assert (scores[:, :, 0] == scores[:, :, -1]).all(-1)[:, 0].all()
    if spec.num_candidates != 1:
        assert scores.std(dim=-1).min() > 0.1  # otherwise the choice would not matter


@torch.inference_mode()
def test_candidates_are_those_of_vllm() -> None:
    _, reference, _ = drafter_of({})
    head = ParallelLMHead(30, HIDDEN)
    torch.nn.init.normal_(head.weight)
    head.quant_method.process_weights_after_loading(head)
    hidden = torch.randn(5, HIDDEN)
    found = LogitsProcessor(30).get_top_k_tokens(head, hidden, 4, return_log_probs=True)
    ids, log_probs = reference.candidates(hidden @ head.weight[:30].T)
    assert torch.equal(ids, found[0])
    torch.testing.assert_close(log_probs, found[1], rtol=1e-5, atol=1e-5)


def test_the_walk_of_one_block_is_that_of_many() -> None:
    candidates, scores = torch.randint(0, 99, (4, 7, 5)), torch.randn(4, 7, 5, 5)
    scores[:, 0] = scores[:, 0, :1]
    tokens, _ = walk_of_blocks(candidates, scores)
    assert tokens.tolist() == [walk(*one) for one in zip(candidates, scores, strict=True)]


@torch.inference_mode()
def test_layers_that_a_checkpoint_numbers() -> None:
    """As in the first exports, with a tensor of another module beside them."""
    spec, reference, tensors = drafter_of({})
    numbered = {"layers.0.mlp.up_proj.weight": torch.zeros(1)}
    for name, tensor in tensors.items():
        for called, number in OLD_NAMES.items():
            name = name.replace(called, number)
        numbered[name] = tensor
    assert sum(name not in numbered for name in tensors) == 2 + 4 + 2 * 4
    assert {our_name(name) for name in numbered} - tensors.keys() == {"layers.0.mlp.up_proj.weight"}
    head = make_head(spec, None)
    loaded = load_head(head, [(our_name(name), one) for name, one in numbered.items()])
    assert {f"{LATTICE}{name}" for name in loaded} == tensors.keys()
    given = inputs(spec, 5)
    expected = reference.scores(*given)
    torch.testing.assert_close(scores_of(head, given), expected, rtol=1e-4, atol=1e-4)
