"""Why a stage may differ: a mistake that explains the engine's numbers, else the usual causes."""

from __future__ import annotations

import torch

from vllm_dflash.tools.parity.compare_request import RecordedRequest, engine_context
from vllm_dflash.tools.parity.layer_mistakes import common_mistakes
from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.parity.recording import DraftStep
from vllm_dflash.tools.parity.stage_errors import relative_error
from vllm_dflash.tools.parity.stages import (
    ACCEPTANCE,
    BLOCK_ROWS,
    CONTEXT_ROWS,
    CONTEXT_Z,
    DRAFTS,
    EMBEDDING,
    FINAL_NORM,
    LOGITS,
    TEXT,
    Stage,
    layer_stage,
    tap_stage,
)

USUAL = {
    CONTEXT_ROWS: "the engine drafted without some of its context: rows were dropped as rejected,"
    " or stored nowhere, or not yet stored",
    CONTEXT_Z: "fc or hidden_norm: weights, the order in which taps are concatenated, epsilon",
    BLOCK_ROWS: "the bonus token, the mask token's id, or the block's positions",
    EMBEDDING: "the target's embedding or its scale, or a mask_embedding.pt that is not used",
    FINAL_NORM: "the final norm's weights or epsilon",
    LOGITS: "the head: its weights, a logit scale or softcap, or rows other than the masks'",
    DRAFTS: "the map from the drafter's vocabulary to the target's (d2t), or DFlash 2's walk along"
    " its candidates: codes, or which token a place's candidates are scored behind",
    ACCEPTANCE: "drafts are right, but others were verified: they are lost or shifted on their way"
    " to the target",
    TEXT: "the target itself, or the verification of drafts, writes other tokens than plain"
    " decoding: not the drafter's doing",
}
USUAL_TAP = "taps off by one, taken behind a norm, or a target that computes something else"
USUAL_LAYER = (
    "rope layout or theta, q and k norms, windows or causality, positions, or weights; if no other"
    " layer differs, what is particular to this one"
)


def likely_cause(
    culprit: Stage, oracle: Oracle, requests: list[RecordedRequest], tolerance: float
) -> str:
    """A sentence on the first stage that differs, from the place where it is worst.

    A hypothesis counts as the cause only if it makes the engine's numbers the reference's.
    """
    spec = oracle.drafter.spec
    if culprit.non_finite:
        return (
            f"{culprit.non_finite} of the engine's numbers here are NaN or infinite: cache that"
            " was never written, weights that were not loaded, or an overflow"
        )
    assert culprit.place is not None
    request = requests[culprit.place.prompt]
    for column, tap in enumerate(spec.taps):
        if culprit.name == tap_stage(tap):
            return _tap_cause(oracle, request, column, tolerance) or USUAL_TAP
    if culprit.name == TEXT:  # which needs no draft to be wrong
        return USUAL[TEXT]
    step = request.recording.steps[culprit.place.step]
    if culprit.name == EMBEDDING:
        expected = oracle.embed(step.input_ids)
        return _factor_cause(step.embedding, expected, tolerance) or USUAL[EMBEDDING]
    if culprit.name == LOGITS:
        return _head_cause(oracle, step, tolerance) or USUAL[LOGITS]
    for number in range(spec.num_layers):
        if culprit.name == layer_stage(number):
            length = request.context_lengths()[culprit.place.step]
            return _layer_cause(oracle, request, step, length, number, tolerance) or USUAL_LAYER
    return USUAL[culprit.name]


def _tap_cause(
    oracle: Oracle, request: RecordedRequest, column: int, tolerance: float
) -> str | None:
    """Which other layer of the target the engine's tap is."""
    spec, recording = oracle.drafter.spec, request.recording
    num_layers = len(oracle.target.get_decoder().layers)
    rows = recording.visible_rows(recording.steps[0], request.prompt_length)
    got = recording.features[rows[rows >= 0]].split(spec.target_hidden_size, dim=-1)[column]
    _, outputs = oracle.text(request.token_ids, range(num_layers))
    layers = outputs[: len(rows)][rows >= 0].split(spec.target_hidden_size, dim=-1)
    for layer, expected in enumerate(layers):
        if relative_error(got, expected) <= tolerance:
            return (
                f"it is the output of layer {layer}, not of layer {spec.taps[column]}: taps count"
                " layers from 0 and mean their outputs (vLLM's own numbers are one higher)"
            )
    return None


def _factor_cause(got: torch.Tensor | None, expected: torch.Tensor, tolerance: float) -> str | None:
    """Whether one is a multiple of the other."""
    assert got is not None
    got, expected = got.float(), expected.float()
    factor = float((got * expected).sum() / (expected * expected).sum())
    if factor != 0 and relative_error(got / factor, expected) <= tolerance:
        return (
            f"the engine's are {factor:.6g} times the reference's: a scale that is left out, or"
            " applied more than once"
        )
    return None


def _head_cause(oracle: Oracle, step: DraftStep, tolerance: float) -> str | None:
    """A scale, or the target's softcap left out."""
    assert step.hidden is not None
    assert step.logits is not None
    expected = oracle.logits(step.hidden[1:])
    if step.candidates is not None:
        return _factor_cause(step.logits, expected.gather(-1, step.candidates), tolerance)
    cap = getattr(oracle.target.config.get_text_config(), "final_logit_softcapping", None)
    capped = None if cap is None else torch.tanh(step.logits.float() / cap) * cap
    if capped is not None and relative_error(capped, expected) <= tolerance:
        return f"the softcap of the target's logits ({cap}) is not applied"
    return _factor_cause(step.logits, expected, tolerance)


def _layer_cause(
    oracle: Oracle,
    request: RecordedRequest,
    step: DraftStep,
    length: int,
    number: int,
    tolerance: float,
) -> str | None:
    """A change of the reference that makes this layer compute what the engine's computes."""
    assert step.embedding is not None
    rows = request.recording.visible_rows(step, length)
    _, features = oracle.text(request.token_ids, oracle.drafter.spec.taps)
    z = engine_context(request, oracle.context(features), rows)
    inputs = [step.embedding, *step.layers]
    for mistake in common_mistakes(oracle.drafter, number):
        context = z if mistake.with_context else z[:0]
        block = length + mistake.block_shift + torch.arange(len(step.input_ids))
        positions = torch.cat([torch.arange(len(context)), block])
        with mistake.made:
            layers, _ = oracle.block(step.embedding, context, fed=inputs, positions=positions)
        if relative_error(step.layers[number], layers[number]) <= tolerance:
            return mistake.cause
    return None
