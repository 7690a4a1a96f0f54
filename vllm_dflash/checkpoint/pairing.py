"""Does this drafter fit this target, and is it split like it? Known before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

MOST_PADDING = 1024
"""Rows at most by which checkpoints with the same tokens differ, so that ranks can divide them."""
CPU_VECTOR = 8
"""Numbers that vLLM's norm takes at a time on CPUs."""


@dataclass(frozen=True)
class PairingTarget:
    """What pairing needs to know about a target model."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    supports_taps: bool
    """Whether vLLM's class of this architecture can hand out hidden states of its layers."""
    on_cpu: bool = False
    rope_theta: float | None = None
    """Base of its rotation; None: it has several, or none."""


def check_pair(drafter: DrafterSpec, target: PairingTarget) -> None:
    """Raise `DrafterError` with every reason why the drafter cannot draft for the target."""
    reasons = []
    if faults := target_faults(target):
        reasons.append(
            f"target {target.model!r} cannot be served with DFlash: {'; '.join(faults)}."
        )
    if faults := pair_faults(drafter, target):
        reasons.append(
            f"drafter {drafter.model!r} does not fit target {target.model!r}: {'; '.join(faults)}."
            " Choose a drafter trained for this target."
        )
    if reasons:
        raise DrafterError(" ".join(reasons))


def beside_target(drafter: DrafterSpec, target: PairingTarget) -> DrafterSpec:
    """The drafter with the target's padded vocabulary, and remarks on doubtful settings.

    It takes the target's number of tokens where no more than padding tells them apart: one that
    embeds and heads with its target's tensors can take any number of them.
    """
    base = drafter.rope_parameters["rope_theta"]
    if drafter.base_is_assumed and target.rope_theta not in (None, base):
        drafter = _remarked(
            drafter,
            f"rope_theta is assumed to be {base:,.0f}, and the target's is"
            f" {target.rope_theta:,.0f}; the drafter was probably trained with that one",
        )
    ours, theirs = drafter.vocab_size, target.vocab_size
    has_own = drafter.needs_own_vocabulary or drafter.draft_vocab_size != ours
    may_share = drafter.dialect == "z-lab" and drafter.dflash2 is None and not has_own
    if ours == theirs or abs(ours - theirs) > MOST_PADDING or not may_share:
        return drafter
    remark = (
        f"vocab_size is {ours} in its config and {theirs} in the target, whose embedding and head"
        " it uses: counted as padding; if it is of another target, its drafts will not be accepted"
    )
    sizes = {"vocab_size": theirs, "draft_vocab_size": theirs}
    return _remarked(drafter, remark, **sizes)


def _remarked(drafter: DrafterSpec, remark: str, **changes: int) -> DrafterSpec:
    return drafter.model_copy(update={**changes, "remarks": (*drafter.remarks, remark)})


def pair_faults(drafter: DrafterSpec, target: PairingTarget) -> list[str]:
    """Every reason why another drafter is needed for this target, with both values."""
    faults = []
    outside = [tap for tap in drafter.taps if tap >= target.num_layers]
    if outside:
        faults.append(
            f"target_layer_ids {outside} lie outside the target, whose {target.num_layers} layers"
            f" are numbered 0 to {target.num_layers - 1}"
        )
    if drafter.num_target_layers not in (None, target.num_layers):
        faults.append(
            f"num_target_layers is {drafter.num_target_layers} in the drafter, the target has"
            f" {target.num_layers} layers"
        )
    if drafter.target_hidden_size != target.hidden_size:
        faults.append(
            f"the drafter reads hidden states of size {drafter.target_hidden_size}, the target's"
            f" hidden_size is {target.hidden_size}"
        )
    faults += _vocabulary_faults(drafter, target)
    if drafter.mask_token_id >= target.vocab_size:
        faults.append(
            f"mask_token_id {drafter.mask_token_id} is outside the target's vocabulary of"
            f" {target.vocab_size} entries"
        )
    if target.on_cpu:
        faults += [
            f"{name} is {size}: vLLM's CPU kernels need a multiple of {CPU_VECTOR}"
            for name, size in (
                ("hidden_size", drafter.hidden_size),
                ("head_dim", drafter.head_dim),
            )
            if size % CPU_VECTOR
        ]
    return faults


def _vocabulary_faults(drafter: DrafterSpec, target: PairingTarget) -> list[str]:
    """Whether ids mean the same to both, as far as their sizes tell."""
    ours, theirs = drafter.vocab_size, target.vocab_size
    if ours == theirs:
        return []
    sizes = f"vocab_size is {ours} in the drafter and {theirs} in the target"
    if drafter.draft_vocab_size != ours:
        # The columns of its own head become ids by `d2t`, which is checked as it is loaded. Its
        # own embedding is given the target's ids.
        lacks_rows = drafter.needs_own_vocabulary and ours < theirs
        return [f"{sizes}, whose last tokens it cannot embed"] if lacks_rows else []
    return [sizes]


def target_faults(target: PairingTarget) -> list[str]:
    """Those that no drafter would mend, and what to do about each."""
    if target.supports_taps:
        return []
    return [
        f"{target.architecture} gives no hidden states to drafters in this vLLM"
        " (its class lacks SupportsEagle3); try --model-impl transformers or another target"
    ]


def undivided(drafter: DrafterSpec, tp_size: int) -> list[str]:
    """What of the drafter does not divide among so many ranks, in words; empty if all does.

    Fewer key/value heads than ranks do, where they divide those: ranks then share a head.
    """
    found = [
        f"{count} {what}"
        for what, count in (
            ("attention heads", drafter.num_heads),
            ("rows of its MLP (intermediate_size)", drafter.intermediate_size),
        )
        if count % tp_size
    ]
    heads = drafter.num_kv_heads
    if heads % tp_size and tp_size % heads:
        found.append(f"{heads} key/value heads")
    return found


def drafter_ranks(drafter: DrafterSpec, tp_size: int, asked: int | None = None) -> int:
    """`tp_size` where the drafter's layers are split, 1 where every rank has them whole.

    Args:
        drafter: what is split.
        tp_size: ranks of the target.
        asked: `draft_tensor_parallel_size` of the speculative config.

    Raises:
        DrafterError: it was asked to be split in another way, or does not divide.
    """
    if (head := drafter.lilicorr) is not None and (
        head.hidden_size % tp_size or head.mlp_size % tp_size
    ):
        raise DrafterError(
            f"drafter {drafter.model!r}: vLLM splits the MLPs of LiLiCorr's head, of"
            f" {head.hidden_size} and {head.mlp_size} rows, and tensor_parallel_size {tp_size}"
            " does not divide them. Use a divisor of both."
        )
    if asked is None:
        return 1 if undivided(drafter, tp_size) else tp_size
    if asked not in (1, tp_size):
        raise DrafterError(
            f"draft_tensor_parallel_size is {asked}, the target's tensor_parallel_size {tp_size}:"
            f" a drafter is split like its target or not at all. Set {tp_size} or 1, or leave it"
            " out."
        )
    if asked > 1 and (parts := undivided(drafter, tp_size)):
        raise DrafterError(
            f"drafter {drafter.model!r} cannot be split by draft_tensor_parallel_size {asked}:"
            f" {', '.join(parts)}. Leave it out, and every rank has the whole drafter."
        )
    return asked


def describe_ranks(drafter: DrafterSpec, tp_size: int, ranks: int) -> str:
    """A sentence for the log on how a drafter lies on several ranks."""
    if ranks > 1:
        return f"the drafter is split over {ranks} ranks, like the target"
    parts = undivided(drafter, tp_size)
    why = f"{', '.join(parts)} do not divide by {tp_size}" if parts else "as configured"
    return f"every one of {tp_size} ranks has the whole drafter ({why})"
