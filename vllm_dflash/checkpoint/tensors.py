"""Tensors that a drafter checkpoint must have, and a check of those it has."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.names import LATTICE, by_our_names, fuse
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec, LiLiCorr

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
MAPS = ("d2t", "t2d")
"""Maps between the drafter's vocabulary and the target's; all other tensors are floating-point."""
NOT_FLOATING = "unquantised tensors must be floating-point"
LINEAR = ("_proj.weight", ".kernel_projection.weight")
"""Suffixes of weights that may be quantised."""
MOST_NAMED = 40
"""Maximum number of tensors that an error names; a wrong depth would miss thousands."""
NEVER_QUANTISED = {
    f"{LATTICE}{name}.weight" for name in ("factor_input_proj", "in_head", "out_head")
}
"""Weights of LiLiCorr's head that are never quantised."""
MASK_EMBEDDING_FILE = "mask_embedding.pt"
"""File with the mask token's embedding, if a checkpoint stores it separately."""


def vocabulary_tensors(spec: DrafterSpec) -> dict[str, Shape]:
    """Names and shapes of the drafter's own embedding and head."""
    return {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
        "d2t": (spec.draft_vocab_size,),
    }


def required_vocabulary(spec: DrafterSpec) -> set[str]:
    """Names of the vocabulary tensors that this drafter requires."""
    required = {"embed_tokens.weight", "lm_head.weight"} if spec.needs_own_vocabulary else set()
    if spec.draft_vocab_size != spec.vocab_size:
        required |= {"lm_head.weight", "d2t"}
    return required


def lattice_tensors(spec: DrafterSpec, head: LiLiCorr) -> dict[str, Shape]:
    """Names and shapes of LiLiCorr's head."""
    hidden, width, rows = spec.hidden_size, head.hidden_size, head.mlp_size
    linear: dict[str, Shape] = {
        **({"token_proj": (width, hidden)} if width != hidden else {}),
        "pass_hidden_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "context_proj": (width, hidden),
        "factor_input_proj": (width, 3 * width),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (head.factor_dim, width)),
    }
    others: dict[str, Shape] = {
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "slot_embedding": (1, 1, spec.max_draft_tokens, 1, width),
        "rank_embedding": (1, 1, 1, head.candidate_topk, width),
        "relative_slot_bias": (head.num_heads, 2 * spec.block_size - 1),
        "same_slot_bias": (head.num_heads,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for layer in (f"layers.{number}." for number in range(head.num_layers)):
        linear |= {
            f"{layer}attn.out_proj": (width, width),
            f"{layer}mlp.up_proj": (rows, width),
            f"{layer}mlp.down_proj": (width, rows),
        }
        others |= {
            f"{layer}attn_norm.weight": (width,),
            f"{layer}attn.in_proj_weight": (3 * width, width),
            f"{layer}attn.in_proj_bias": (3 * width,),
            f"{layer}mlp_norm.weight": (width,),
        }
    for name, shape in linear.items():
        others |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"{LATTICE}{name}": shape for name, shape in others.items()}


def expected_tensors(spec: DrafterSpec) -> dict[str, Shape]:
    """Names and shapes of everything between the embedding and the head."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: dict[str, Shape] = {
        "fc.weight": (hidden, len(spec.taps) * spec.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if spec.dflash2 is not None:
        codes = (spec.vocab_size, spec.dflash2.selector_rank)
        tensors |= {
            "candidate_selector.predecessor_codebook": codes,
            "candidate_selector.successor_codebook": codes,
            "candidate_selector.hidden_projection.weight": (spec.dflash2.selector_rank, hidden),
        }
    if spec.lilicorr is not None:
        tensors |= lattice_tensors(spec, spec.lilicorr)
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if (made := spec.convolutions) is not None:
        taps, groups = made.conv_kernel_size, hidden // made.conv_group_size
        for convolution in ("attention_conv", "mlp_conv"):
            # One kernel for the sublayer's input, one for its output.
            layer[f"{convolution}.base_kernel"] = (2, taps, hidden)
            layer[f"{convolution}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if spec.attention_sinks:
        layer["self_attn.attention_sink_bias"] = (spec.num_heads,)
    if spec.attention_bias:
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "o_proj": hidden}
        layer |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    for number in range(spec.num_layers):
        tensors |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return tensors


def quantised_parts(spec: DrafterSpec, found: Collection[str]) -> dict[str, set[str]]:
    """Names of the tensors that replace each quantised weight, by the weight's name; all ours.

    Their meaning and shapes depend on the quantisation method, which vLLM checks.
    """
    if spec.quantization is None:
        return {}
    parts: dict[str, set[str]] = {}
    for weight in expected_tensors(spec):
        if _may_be_quantised(weight):
            layer = weight.removesuffix("weight")
            inside = {name for name in found if name.startswith(layer)} - {f"{layer}bias"}
            if inside - {weight}:
                parts[weight] = inside
    return parts


def unread_tensors(spec: DrafterSpec, found: Collection[str]) -> set[str]:
    """Names of tensors that the drafter may have been trained with, and that neither we nor vLLM's
    own DFlash load: biases of layers that have none by the config, and a mask embedding outside
    `mask_embedding.pt`. `found`: our names."""
    known = expected_tensors(spec) | vocabulary_tensors(spec)
    layers = {name[:at] for name in known for at, letter in enumerate(name) if letter == "."}
    return {
        name
        for name in {*found} - known.keys()
        if (name.removesuffix(".bias") in layers and not name.startswith(LATTICE))
        or name == "mask_embedding"
    }


def _may_be_quantised(weight: str) -> bool:
    if weight.startswith(LATTICE):
        return weight.endswith((*LINEAR, "_head.weight")) and weight not in NEVER_QUANTISED
    return weight == "fc.weight" or (weight.startswith("layers.") and weight.endswith(LINEAR))


def tensor_faults(spec: DrafterSpec, found: Mapping[str, Tensor]) -> list[str]:
    """Differences between the `found` tensors and those that the config implies, one text each.
    Raises like `by_our_names`."""
    found = by_our_names(spec.model, found)
    found = {name: tensor for name, tensor in found.items() if not spec.leaves_out(name)}
    quantised = quantised_parts(spec, found)
    unjudged = unread_tensors(spec, found).union(*quantised.values())
    found = {name: tensor for name, tensor in found.items() if name not in unjudged}
    vocabulary, expected = vocabulary_tensors(spec), expected_tensors(spec)
    for weight in quantised:
        del expected[weight]
    fuse(expected, found)
    wanted = found.keys() & vocabulary | required_vocabulary(spec)
    expected |= {name: vocabulary[name] for name in sorted(wanted)}
    faults = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - found)]
    for name in sorted(found.keys() - expected):
        faults.append(f"surplus {name} {list(found[name].shape)}")
    both = {name: found[name] for name in expected if name in found}
    for name, tensor in both.items():
        if tensor.shape != expected[name]:
            implied = f"config.json implies {list(expected[name])}"
            faults.append(f"{name} has shape {list(tensor.shape)}, {implied}")
    for name, tensor in both.items():
        if name not in MAPS and not tensor.is_floating:
            faults.append(f"{name} is stored as {tensor.dtype}: {NOT_FLOATING}")
    return faults


def check_tensors(spec: DrafterSpec, found: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit the config. Raises `DrafterError`, which names each."""
    faults = tensor_faults(spec, found)
    if not faults:
        return
    remedy = "Download the drafter again: weights and config.json belong together"
    if all(fault.startswith("surplus ") for fault in faults):
        remedy += ", or remove what is surplus, which nothing reads (docs/checkpoints.md says how)"
    if any(fault.endswith(NOT_FLOATING) for fault in faults):
        remedy = (
            "Integer weights need a quantization_config in config.json that says how to read them,"
            " and their scales in the checkpoint: download the drafter again, or use the"
            " unquantised checkpoint that this one was made from"
        )
    shown = "; ".join(faults[:MOST_NAMED])
    more = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    raise DrafterError(
        f"drafter {spec.model!r}: the weights do not match config.json: {shown}{more}. {remedy}."
    )


def parse_mask_embedding(spec: DrafterSpec, content: bytes) -> torch.Tensor:
    """The embedding, [H], on the CPU. Never runs code from the pickle.

    Raises:
        DrafterError: the file holds anything but a tensor (alone, or as `embedding` in a
            dictionary), or the embedding is for another mask token, or of another size.
    """
    import torch

    def refuse(why: str) -> DrafterError:
        return DrafterError(f"drafter {spec.model!r}: {MASK_EMBEDDING_FILE} {why}.")

    try:
        state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    # Everything that torch raises on a malicious file.
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(f"cannot be read as plain tensors: {reason}") from error
    if isinstance(state, dict):
        token = state.get("mask_token_id", spec.mask_token_id)
        if token != spec.mask_token_id:
            raise refuse(f"is for mask_token_id {token}, config.json says {spec.mask_token_id}")
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor):
        raise refuse(f"holds a {type(state).__name__}, not a tensor")
    # Before anything is copied: a few bytes can claim any number of elements.
    if state.numel() != spec.hidden_size:
        raise refuse(f"has {state.numel()} numbers, hidden_size is {spec.hidden_size}")
    return state.reshape(-1)
