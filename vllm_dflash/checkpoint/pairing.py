"""Checks before an engine starts: does this drafter fit this target, and how is it split?"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

MOST_PADDING = 1024
"""Largest vocabulary difference taken for padding, which lets ranks divide the rows."""
CPU_VECTOR = 8
"""Numbers that vLLM's norm processes at a time on CPUs."""


@dataclass(frozen=True)
class PairingTarget:
    """Facts about a target model that pairing needs."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    supports_taps: bool
    """Whether vLLM's class for this architecture can return hidden states of its layers."""
    on_cpu: bool = False
    rope_theta: float | None = None
    """Base of its rotation; None if it has several, or none."""


def check_pair(drafter: DrafterSpec, target: PairingTarget) -> None:
    """Raise `DrafterError` with every reason why the drafter cannot draft for the target."""
    reasons = []
    if reason := target_unsupported_reason(target):
        reasons.append(f"target {target.model!r} cannot be served with DFlash: {reason}.")
    if faults := pair_faults(drafter, target):
        reasons.append(
            f"drafter {drafter.model!r} does not fit target {target.model!r}: {'; '.join(faults)}."
            " Choose a drafter trained for this target."
        )
    if reasons:
        raise DrafterError(" ".join(reasons))


def adapt_to_target(drafter: DrafterSpec, target: PairingTarget) -> DrafterSpec:
    """The drafter with the target's padded vocabulary, and remarks on doubtful settings.

    If the vocabulary sizes differ only by padding, it takes the target's: a drafter that uses its
    target's embedding and head works with any size.
    """
    base = drafter.rope_parameters["rope_theta"]
    if drafter.base_is_assumed and target.rope_theta not in (None, base):
        drafter = _remarked(
            drafter,
            f"rope_theta is assumed to be {base:,.0f}, and the target's is"
            f" {target.rope_theta:,.0f}; the drafter was probably trained with the target's",
        )
    ours, theirs = drafter.vocab_size, target.vocab_size
    has_own = drafter.needs_own_vocabulary or drafter.draft_vocab_size != ours
    may_share = drafter.dialect != "speculators" and drafter.dflash2 is None and not has_own
    if ours == theirs or abs(ours - theirs) > MOST_PADDING or not may_share:
        return drafter
    remark = (
        f"vocab_size is {ours} in its config and {theirs} in the target, whose embedding and head"
        " it uses: the difference is taken for padding; if the drafter was trained for another"
        " target, its drafts will not be accepted"
    )
    sizes = {"vocab_size": theirs, "draft_vocab_size": theirs}
    return _remarked(drafter, remark, **sizes)


def _remarked(drafter: DrafterSpec, remark: str, **changes: int) -> DrafterSpec:
    return drafter.model_copy(update={**changes, "remarks": (*drafter.remarks, remark)})


def pair_faults(drafter: DrafterSpec, target: PairingTarget) -> list[str]:
    """Every reason why this target needs another drafter, with both values."""
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
            for name, size in (("hidden_size", drafter.hidden_size), ("head_dim", drafter.head_dim))
            if size % CPU_VECTOR
        ]
    return faults


def _vocabulary_faults(drafter: DrafterSpec, target: PairingTarget) -> list[str]:
    """Reasons why token ids may differ between both, judged by their sizes."""
    ours, theirs = drafter.vocab_size, target.vocab_size
    if ours == theirs:
        return []
    sizes = f"vocab_size is {ours} in the drafter and {theirs} in the target"
    if drafter.draft_vocab_size != ours:
        # `d2t`, which is checked when it is loaded, maps columns of the drafter's own head to ids.
        # Its own embedding gets the target's ids.
        lacks_rows = drafter.needs_own_vocabulary and ours < theirs
        return [f"{sizes}, whose last tokens it cannot embed"] if lacks_rows else []
    return [sizes]


def target_unsupported_reason(target: PairingTarget) -> str | None:
    """Reason why this target cannot have any drafter, and what to do about it; None if it can."""
    if target.supports_taps:
        return None
    return (
        f"{target.architecture} gives no hidden states to drafters in this vLLM"
        " (its class lacks SupportsEagle3); try --model-impl transformers or another target"
    )


def undivided_parts(drafter: DrafterSpec, tp_size: int) -> list[str]:
    """Parts of the drafter that `tp_size` ranks do not divide, in words; empty if there are none.

    Fewer key/value heads than ranks are fine if they divide the ranks: ranks then share a head.
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
    """Ranks that the drafter's layers are split over: `tp_size`, or 1 if each rank has all of them.

    `tp_size`: ranks of the target; `asked`: `draft_tensor_parallel_size` of the speculative config.

    Raises:
        DrafterError: `asked` is another number, or the drafter does not divide.
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
        return 1 if undivided_parts(drafter, tp_size) else tp_size
    if asked not in (1, tp_size):
        raise DrafterError(
            f"draft_tensor_parallel_size is {asked}, the target's tensor_parallel_size {tp_size}:"
            f" a drafter is split like its target or not at all. Set {tp_size} or 1, or leave it"
            " out."
        )
    if asked > 1 and (parts := undivided_parts(drafter, tp_size)):
        raise DrafterError(
            f"drafter {drafter.model!r} cannot be split by draft_tensor_parallel_size {asked},"
            f" which does not divide {', '.join(parts)}. Leave it out: then every rank has the"
            " whole drafter."
        )
    return asked


def describe_ranks(drafter: DrafterSpec, tp_size: int, ranks: int) -> str:
    """Log message about how a drafter is split over several ranks."""
    if ranks > 1:
        return f"the drafter is split over {ranks} ranks, like the target"
    parts = undivided_parts(drafter, tp_size)
    why = f"{', '.join(parts)} do not divide by {tp_size}" if parts else "as configured"
    return f"each of {tp_size} ranks has the whole drafter ({why})"
