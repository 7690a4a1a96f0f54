"""The tensors a drafter checkpoint must hold, compared with those it does hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

Shape = tuple[int, ...]
MAPS = ("d2t", "t2d")
"""Between a drafter's vocabulary and its target's; all else is numbers."""
UNQUANTISED = (
    "Weights of integers need a quantization_config in config.json that says how to read them, and"
    " their scales beside them: download the drafter again, or take the unquantised checkpoint that"
    " this one was made from"
)
DOWNLOAD = "Download the drafter again: weights and config.json belong together"
LINEAR = ("_proj.weight", ".kernel_projection.weight")
"""Ends of the names of layers that may be quantised."""
MOST_NAMED = 40
"""Tensors that a refusal names; a config with a wrong depth misses thousands."""


def vocabulary_tensors(spec: DrafterSpec) -> dict[str, Shape]:
    """Names and shapes of an embedding and a head of the drafter's own."""
    return {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
        "d2t": (spec.draft_vocab_size,),
        "t2d": (spec.vocab_size,),
    }


def required_vocabulary(spec: DrafterSpec) -> set[str]:
    """Which of them this drafter cannot do without."""
    required = {"embed_tokens.weight", "lm_head.weight"} if spec.needs_own_vocabulary else set()
    if spec.draft_vocab_size != spec.vocab_size:
        required |= {"lm_head.weight", "d2t"}
    return required


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
    for number in range(spec.num_layers):
        layer = f"layers.{number}"
        attention = f"{layer}.self_attn"
        tensors |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (q_size, hidden),
            f"{attention}.k_proj.weight": (kv_size, hidden),
            f"{attention}.v_proj.weight": (kv_size, hidden),
            f"{attention}.o_proj.weight": (hidden, q_size),
            f"{attention}.q_norm.weight": (spec.head_dim,),
            f"{attention}.k_norm.weight": (spec.head_dim,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if spec.dflash2 is not None:
            taps, groups = spec.dflash2.conv_kernel_size, hidden // spec.dflash2.conv_group_size
            for convolution in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
                # One kernel for what goes into the sublayer, one for what comes out.
                tensors |= {
                    f"{convolution}.base_kernel": (2, taps, hidden),
                    f"{convolution}.kernel_projection.weight": (2 * taps * groups, hidden),
                }
        if spec.attention_sinks:
            tensors[f"{attention}.attention_sink_bias"] = (spec.num_heads,)
        if spec.attention_bias:
            tensors |= {
                f"{attention}.q_proj.bias": (q_size,),
                f"{attention}.k_proj.bias": (kv_size,),
                f"{attention}.v_proj.bias": (kv_size,),
                f"{attention}.o_proj.bias": (hidden,),
            }
    return tensors


@dataclass(frozen=True)
class TensorFaults:
    """Where the tensors of a checkpoint are not those its config implies, by name."""

    missing: dict[str, Shape]
    surplus: dict[str, Shape]
    misshapen: dict[str, tuple[Shape, Shape]]
    """Shape found and shape implied."""
    integers: dict[str, str]
    """Weights that are not stored in floating point, and how they are."""

    def messages(self) -> list[str]:
        """One sentence each, in order."""
        return [
            *(f"missing {name} {list(shape)}" for name, shape in self.missing.items()),
            *(f"surplus {name} {list(shape)}" for name, shape in self.surplus.items()),
            *(
                f"{name} has shape {list(found)}, config.json implies {list(implied)}"
                for name, (found, implied) in self.misshapen.items()
            ),
            *(
                f"{name} is stored as {dtype}: what is not quantised must be floating-point numbers"
                for name, dtype in self.integers.items()
            ),
        ]


def quantised_parts(spec: DrafterSpec, found: Collection[str]) -> dict[str, set[str]]:
    """Of each weight that a checkpoint has quantised: the tensors that are there instead of it.

    By name. What they are and what shapes they have is a matter of the method, which vLLM knows.
    """
    if spec.quantization is None:
        return {}
    parts: dict[str, set[str]] = {}
    for weight in expected_tensors(spec):
        if weight == "fc.weight" or (weight.startswith("layers.") and weight.endswith(LINEAR)):
            layer = weight.removesuffix("weight")
            inside = {name for name in found if name.startswith(layer)} - {f"{layer}bias"}
            if inside - {weight}:
                parts[weight] = inside
    return parts


def compare_tensors(spec: DrafterSpec, found: Mapping[str, Tensor]) -> TensorFaults:
    """What is missing, surplus, misshapen or no weights among the `found` tensors, by name."""
    quantised = quantised_parts(spec, found)
    unjudged = set().union(*quantised.values())
    found = {
        name: tensor
        for name, tensor in found.items()
        if name not in unjudged and not spec.leaves_out(name)
    }
    vocabulary, expected = vocabulary_tensors(spec), expected_tensors(spec)
    for weight in quantised:
        del expected[weight]
    wanted = found.keys() & vocabulary | required_vocabulary(spec)
    expected |= {name: vocabulary[name] for name in sorted(wanted)}
    return TensorFaults(
        missing={name: expected[name] for name in sorted(expected.keys() - found)},
        surplus={name: found[name].shape for name in sorted(found.keys() - expected)},
        misshapen={
            name: (found[name].shape, shape)
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        },
        integers={
            name: found[name].dtype
            for name in expected
            if name in found and name not in MAPS and not found[name].is_floating
        },
    )


def check_tensors(spec: DrafterSpec, found: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit the config, each by name. Raises `DrafterError`."""
    compared = compare_tensors(spec, found)
    faults = compared.messages()
    if len(faults) > MOST_NAMED:
        faults = [*faults[:MOST_NAMED], f"and {len(faults) - MOST_NAMED} more"]
    if faults:
        raise DrafterError(
            f"drafter {spec.model!r}: the weights do not match config.json: {'; '.join(faults)}."
            f" {UNQUANTISED if compared.integers else DOWNLOAD}."
        )
