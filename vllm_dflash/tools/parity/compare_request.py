"""Walks along the text an engine wrote, and compares every stage of every draft step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.parity.recording import NOT_VERIFIED, DraftStep, Recording
from vllm_dflash.tools.parity.stage_errors import (
    count_non_finite,
    gap_to_best,
    relative_error,
    share_of,
)
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
    Place,
    StageErrors,
    layer_stage,
    tap_stage,
)


@dataclass(frozen=True)
class RecordedRequest:
    """A prompt with what the engine made of it."""

    token_ids: list[int]
    """The prompt and the new tokens."""
    prompt_length: int
    recording: Recording

    def context_lengths(self) -> list[int]:
        """Tokens before the bonus token at each step, by what was accepted so far."""
        lengths = []
        length = self.prompt_length
        for step in self.recording.steps:
            lengths.append(min(length, len(self.token_ids) - 1))
            length += 1 + max(step.num_accepted, 0)
        return lengths

    def block_ids(self, step: DraftStep, context_length: int, mask_token_id: int) -> torch.Tensor:
        """The tokens a step's block should have, [Q]: the bonus token, then masks."""
        masks = [mask_token_id] * (len(step.input_ids) - 1)
        return torch.tensor([self.token_ids[context_length], *masks])


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of each verified step of a prompt."""

    engine: list[int]
    reference: list[int]
    """Of the reference's drafts, at the same places in the same text."""


@dataclass(frozen=True)
class ReferenceText:
    """What the reference makes of a whole text of T tokens."""

    logits: torch.Tensor
    """Of the target, [T, V]."""
    features: torch.Tensor
    """[T, m * H_target]."""
    z: torch.Tensor
    """[T, H]."""


def compare_request(
    oracle: Oracle, request: RecordedRequest, prompt: int, errors: StageErrors
) -> Acceptance:
    """Compare all steps of one request, the prompt-th."""
    logits, features = oracle.text(request.token_ids, oracle.drafter.spec.taps)
    text = ReferenceText(logits, features, oracle.context(features))
    _compare_text(request, text, prompt, errors)
    acceptance = Acceptance([], [])
    checked = torch.zeros(len(request.recording.positions), dtype=torch.bool)
    lengths = request.context_lengths()
    for number, (step, length) in enumerate(zip(request.recording.steps, lengths, strict=True)):
        place = Place(prompt, number)
        rows = request.recording.visible_rows(step, length)
        _compare_context(oracle, request, text, rows, checked, place, errors)
        expected = _compare_block(oracle, request, text, step, rows, place, errors)
        _compare_drafts(oracle, request, step, length, expected, place, errors, acceptance)
    return acceptance


def _compare_text(
    request: RecordedRequest, text: ReferenceText, prompt: int, errors: StageErrors
) -> None:
    start = request.prompt_length
    chosen = torch.tensor(request.token_ids[start:])
    gap = gap_to_best(text.logits[start - 1 : -1], chosen)
    errors.observe(TEXT, Place(prompt, 0), gap)


def _compare_context(
    oracle: Oracle,
    request: RecordedRequest,
    text: ReferenceText,
    rows: torch.Tensor,
    checked: torch.Tensor,
    place: Place,
    errors: StageErrors,
) -> None:
    """Taps and Z of the rows this step sees and no step before it saw."""
    recording, spec = request.recording, oracle.drafter.spec
    errors.observe(CONTEXT_ROWS, place, share_of(rows < 0))
    is_new = rows >= 0
    is_new[is_new.clone()] = ~checked[rows[is_new]]
    new = rows[is_new]
    checked[new] = True
    features, z = recording.features[new], recording.z[new]
    taps = zip(
        spec.taps,
        features.split(spec.target_hidden_size, dim=-1),
        text.features[: len(rows)][is_new].split(spec.target_hidden_size, dim=-1),
        strict=True,
    )
    for tap, got, expected in taps:
        error = relative_error(got, expected)
        errors.observe(tap_stage(tap), place, error, non_finite=count_non_finite(got))
    errors.observe(
        CONTEXT_Z,
        place,
        relative_error(z, oracle.context(features)),
        relative_error(z, text.z[: len(rows)][is_new]),
        count_non_finite(z),
    )


def _compare_block(
    oracle: Oracle,
    request: RecordedRequest,
    text: ReferenceText,
    step: DraftStep,
    rows: torch.Tensor,
    place: Place,
    errors: StageErrors,
) -> torch.Tensor:
    """From the block's tokens to its logits; returns the reference's, [K, V']."""
    assert step.embedding is not None
    assert step.hidden is not None
    assert step.logits is not None
    length = len(rows)
    ids = request.block_ids(step, length, oracle.drafter.spec.mask_token_id)
    positions = torch.arange(length, length + len(ids))
    wrong = (step.input_ids != ids) | (step.positions != positions)
    errors.observe(BLOCK_ROWS, place, share_of(wrong))

    embedding = oracle.embed(ids)
    errors.observe(
        EMBEDDING,
        place,
        relative_error(step.embedding, oracle.embed(step.input_ids)),
        relative_error(step.embedding, embedding),
        count_non_finite(step.embedding),
    )
    layers, hidden = oracle.block(embedding, text.z[:length])
    engine_z = engine_context(request, text.z, rows)
    inputs = [step.embedding, *step.layers]
    layers_alone, hidden_alone = oracle.block(step.embedding, engine_z, fed=inputs)
    for number, (got, alone, expected) in enumerate(
        zip(step.layers, layers_alone, layers, strict=True)
    ):
        errors.observe(
            layer_stage(number),
            place,
            relative_error(got, alone),
            relative_error(got, expected),
            count_non_finite(got),
        )
    errors.observe(
        FINAL_NORM,
        place,
        relative_error(step.hidden, hidden_alone),
        relative_error(step.hidden, hidden),
        count_non_finite(step.hidden),
    )
    logits = oracle.logits(hidden[1:])
    errors.observe(
        LOGITS,
        place,
        relative_error(step.logits, oracle.logits(step.hidden[1:])),
        relative_error(step.logits, logits),
        count_non_finite(step.logits),
    )
    return logits


def engine_context(request: RecordedRequest, z: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The engine's fused context by position, [C, H]; the reference's where there is none."""
    mine = request.recording.z[rows.clamp(min=0)] if len(request.recording.z) else z[: len(rows)]
    return torch.where((rows >= 0)[:, None], mine, z[: len(rows)])


def _compare_drafts(
    oracle: Oracle,
    request: RecordedRequest,
    step: DraftStep,
    length: int,
    expected: torch.Tensor,
    place: Place,
    errors: StageErrors,
    acceptance: Acceptance,
) -> None:
    assert step.logits is not None
    assert step.drafts is not None
    tokens = oracle.drafter.target_ids(torch.arange(expected.shape[-1]))  # of each column, [V']
    is_best = step.logits == step.logits.amax(-1, keepdim=True)  # [K, V'], ties included
    is_drafted = tokens[None] == step.drafts[:, None]
    right = (is_best & is_drafted).any(-1)
    gap = gap_to_best(expected, is_drafted.int().argmax(-1)) if is_drafted.any(-1).all() else 1.0
    errors.observe(DRAFTS, place, share_of(~right), gap)
    if step.num_accepted == NOT_VERIFIED:
        errors.observe(ACCEPTANCE, place, 1.0)
        return
    verified = request.token_ids[length + 1 : length + 1 + step.num_drafted]
    by_text = count_matches(step.drafts.tolist(), verified)
    errors.observe(ACCEPTANCE, place, float(step.num_accepted != by_text))
    acceptance.engine.append(step.num_accepted)
    acceptance.reference.append(count_matches(tokens[expected.argmax(-1)].tolist(), verified))


def count_matches(drafts: list[int], tokens: list[int]) -> int:
    """How many drafts are accepted, if these are the target's tokens."""
    for count, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(tokens))
