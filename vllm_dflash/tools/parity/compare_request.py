"""Walks along the text an engine wrote, and compares every stage of every draft step."""

from __future__ import annotations

import torch

from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.parity.parity_report import Acceptance
from vllm_dflash.tools.parity.recording import NOT_VERIFIED, DraftStep, RecordedRequest
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
    gap_to_best,
    layer_stage,
    share_of,
    tap_stage,
)


@torch.inference_mode()
def compare_request(
    oracle: Oracle, request: RecordedRequest, prompt: int, errors: StageErrors
) -> Acceptance:
    """Compare all steps of one request, the prompt-th."""
    comparison = _Comparison(oracle, request, prompt, errors)
    comparison.run()
    return comparison.acceptance


class _Comparison:
    """Of a request: `logits` [T, V], `features` [T, m * H_target], `z` [T, H] of the oracle."""

    def __init__(
        self, oracle: Oracle, request: RecordedRequest, prompt: int, errors: StageErrors
    ) -> None:
        self.oracle, self.drafter = oracle, oracle.drafter
        self.request, self.prompt, self.errors = request, prompt, errors
        self.recording, self.spec = request.recording, oracle.drafter.spec
        self.logits, self.features = oracle.text(request.token_ids, self.spec.taps)
        self.z = self.drafter.context(self.features)
        self.checked = torch.zeros(len(self.recording.positions), dtype=torch.bool)
        """Context rows that a step before saw."""
        self.acceptance = Acceptance([], [])

    def run(self) -> None:
        """All stages of all steps."""
        start = self.request.prompt_length
        chosen = torch.tensor(self.request.token_ids[start:])
        gap = gap_to_best(self.logits[start - 1 : -1], chosen)
        self.errors.observe(TEXT, Place(self.prompt, 0), gap)
        steps = zip(self.recording.steps, self.request.context_lengths(), strict=True)
        for number, (step, length) in enumerate(steps):
            place = Place(self.prompt, number)
            rows = self.recording.visible_rows(step, length)
            self._compare_context(rows, place)
            hidden, logits = self._compare_block(step, rows, place)
            self._compare_drafts(step, hidden, logits, place)
            self._compare_acceptance(step, length, hidden, logits, place)

    def _compare_context(self, rows: torch.Tensor, place: Place) -> None:
        """Taps and Z of the rows this step sees and no step before it saw."""
        self.errors.observe(CONTEXT_ROWS, place, share_of(rows < 0))
        is_new = rows >= 0
        is_new[is_new.clone()] = ~self.checked[rows[is_new]]
        new = rows[is_new]
        self.checked[new] = True
        features, width = self.recording.features[new], self.spec.target_hidden_size
        expected_features = self.features[: len(rows)][is_new].split(width, dim=-1)
        taps = zip(self.spec.taps, features.split(width, dim=-1), expected_features, strict=True)
        for tap, got, expected in taps:
            self.errors.compare(tap_stage(tap), place, got, expected, expected)
        expected_z = self.z[: len(rows)][is_new]
        alone = self.drafter.context(features)
        self.errors.compare(CONTEXT_Z, place, self.recording.z[new], alone, expected_z)

    def _engine_context(self, rows: torch.Tensor) -> torch.Tensor:
        """The engine's fused context by position, [C, H]; the reference's where there is none."""
        mine, z = self.recording.z, self.z[: len(rows)]
        return torch.where((rows >= 0)[:, None], mine[rows.clamp(min=0)], z) if len(mine) else z

    def _compare_block(
        self, step: DraftStep, rows: torch.Tensor, place: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the block's tokens to its logits.

        Returns:
            The reference's hidden states and logits of the mask rows, [K, H] and [K, V'].
        """
        target, compare, length = self.oracle.target, self.errors.compare, len(rows)
        ids = torch.full_like(step.input_ids, self.spec.mask_token_id).long()
        ids[0] = self.request.token_ids[length]
        positions = torch.arange(length, length + len(ids))
        wrong = (step.input_ids != ids) | (step.positions != positions)
        self.errors.observe(BLOCK_ROWS, place, share_of(wrong))

        embedding = self.drafter.embed(ids, target)
        alone = self.drafter.embed(step.input_ids.long(), target)
        compare(EMBEDDING, place, step.embedding, alone, embedding)
        layers, hidden = self.oracle.block(embedding, self.z[:length])
        layers_alone, hidden_alone = self.oracle.block(
            step.embedding, self._engine_context(rows), fed=[step.embedding, *step.layers]
        )
        of_layers = zip(step.layers, layers_alone, layers, strict=True)
        for number, (got, alone, expected) in enumerate(of_layers):
            compare(layer_stage(number), place, got, alone, expected)
        compare(FINAL_NORM, place, step.hidden, hidden_alone, hidden)
        logits = self.drafter.logits(hidden[1:], target)
        alone, expected = (
            found if step.candidates is None else found.gather(-1, step.candidates)
            for found in (self.drafter.logits(step.hidden[1:], target), logits)
        )
        compare(LOGITS, place, step.logits, alone, expected)
        return hidden[1:], logits

    def _compare_drafts(
        self, step: DraftStep, hidden: torch.Tensor, expected: torch.Tensor, place: Place
    ) -> None:
        if step.candidates is None:
            alone, gap = self._likeliest(step, expected)
        else:
            mine = self.drafter.logits(step.hidden[1:], self.oracle.target)
            alone = self._walked(step, step.hidden[1:], mine)
            gap = self._walked(step, hidden, expected)
        self.errors.observe(DRAFTS, place, alone, gap)

    def _likeliest(self, step: DraftStep, expected: torch.Tensor) -> tuple[float, float]:
        """Share of drafts that are not the best of the engine's own logits, and how far they lie
        below the best of the reference's, [K, V']."""
        tokens = self.drafter.target_ids(torch.arange(expected.shape[-1]))  # [V']
        is_best = step.logits == step.logits.amax(-1, keepdim=True)  # [K, V'], ties included
        is_drafted = tokens[None] == step.drafts[:, None]
        right = (is_best & is_drafted).any(-1)
        return share_of(~right), _gap_of_drafted(expected, is_drafted)

    def _walked(self, step: DraftStep, hidden: torch.Tensor, logits: torch.Tensor) -> float:
        """How far the engine's drafts lie below the best candidates, each behind the engine's own
        draft before it, by hidden states [K, H] and logits [K, V']."""
        before = torch.cat([step.input_ids[:1].long(), step.drafts[:-1].long()])
        candidates, scores = self.oracle.scores(logits, hidden, before)  # [K, C]
        return _gap_of_drafted(scores, candidates == step.drafts[:, None])

    def _compare_acceptance(
        self,
        step: DraftStep,
        length: int,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        place: Place,
    ) -> None:
        if step.num_accepted == NOT_VERIFIED:
            self.errors.observe(ACCEPTANCE, place, 1.0)
            return
        verified = self.request.token_ids[length + 1 : length + 1 + step.num_drafted]
        by_text = count_matches(step.drafts.tolist(), verified)
        self.errors.observe(ACCEPTANCE, place, float(step.num_accepted != by_text))
        of_reference = self.drafter.choose(logits, hidden, int(step.input_ids[0])).tolist()
        self.acceptance.engine.append(step.num_accepted)
        self.acceptance.reference.append(count_matches(of_reference, verified))


def _gap_of_drafted(scores: torch.Tensor, is_drafted: torch.Tensor) -> float:
    """How far drafts lie below the best of [K, C]; 1 where one of them is not among these."""
    known = is_drafted.any(-1).all()
    return gap_to_best(scores, is_drafted.int().argmax(-1)) if known else 1.0


def count_matches(drafts: list[int], tokens: list[int]) -> int:
    """How many drafts are accepted, if these are the target's tokens."""
    for count, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(tokens))
