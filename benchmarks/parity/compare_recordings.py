"""Compares every stage of every draft step in an engine's recordings with the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parity.oracle import Oracle
from parity.parity_report import (
    TOLERANCES,
    Acceptance,
    ParityReport,
    Stage,
    stage_names,
)
from parity.recorder import NOT_VERIFIED, DraftStep, Recording
from vllm_dflash.tools.progress import Progress


def compare(
    recordings: Sequence[Recording],
    oracle: Oracle,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare recordings with the reference. Raises ValueError if the engine drafted nothing."""
    spec, dtype = oracle.drafter.spec, str(oracle.target.dtype).removeprefix("torch.")
    stages = {name: Stage(name) for name in stage_names(spec)}
    acceptance = []
    with (progress or Progress()).stage("comparing", len(recordings), "prompts") as tell:
        for number, recording in enumerate(recordings):
            acceptance.append(_Comparison(oracle, recording, number, stages).run())
            tell(number + 1)
    if not any(one.engine for one in acceptance):
        raise ValueError("the engine drafted nothing: pass more --tokens or other prompts.")
    return ParityReport(
        drafter=spec.model,
        target=oracle.target.name_or_path,
        runner=recordings[0].runner,
        dtype=dtype,
        tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        stages=tuple(stages.values()),
        acceptance=tuple(acceptance),
        nan_drafts=sum(one.nan_drafts for one in recordings),
    )


class _Comparison:
    """Compares one request.

    The oracle's values for its T tokens: `logits` [T, V], `features` [T, m * H_target], `z` [T, H].
    """

    def __init__(
        self, oracle: Oracle, recording: Recording, prompt: int, stages: dict[str, Stage]
    ) -> None:
        self.oracle, self.drafter, self.spec = oracle, oracle.drafter, oracle.drafter.spec
        self.recording, self.prompt, self.stages = recording, prompt, stages
        self.number = 0
        """Index of the draft step being compared."""
        self.checked = torch.zeros(len(recording.positions), dtype=torch.bool)
        """Whether an earlier step saw this context row."""
        self.acceptance = Acceptance([], [])

    @torch.inference_mode()
    def run(self) -> Acceptance:
        """Compare all stages of all steps. Returns the accepted drafts."""
        recording, start = self.recording, self.recording.prompt_length
        self.logits, self.features = self.oracle.text(recording.token_ids, self.spec.taps)
        self.z = self.drafter.context(self.features)
        written = torch.tensor(recording.token_ids[start:])
        self._observe("text", gap_to_best(self.logits[start - 1 : -1], written))
        decoded = start
        for self.number, step in enumerate(recording.steps):
            length = min(decoded, len(recording.token_ids) - 1)  # tokens before the bonus token
            rows = recording.visible_rows(step, length)
            self._compare_context(rows)
            hidden, logits = self._compare_block(step, rows)
            self._compare_drafts(step, rows, hidden, logits)
            self._compare_acceptance(step, length, hidden, logits)
            decoded += 1 + max(step.num_accepted, 0)
        return self.acceptance

    def _observe(self, name: str, alone: float, end_to_end: float | None = None) -> None:
        self.stages[name].observe(self.prompt, self.number, alone, end_to_end)

    def _compare(
        self, name: str, got: torch.Tensor, alone: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Record the errors of a stage, from three values of one shape.

        Args:
            name: name of the stage.
            got: the engine's value.
            alone: the reference's value from the engine's inputs.
            expected: the reference's value from its own inputs.
        """
        self._observe(name, relative_error(got, alone), relative_error(got, expected))

    def _compare_context(self, rows: torch.Tensor) -> None:
        """Compare taps and Z of the context rows that this step is the first to see."""
        self._observe("context rows", (rows < 0).float().mean().item())
        is_new = rows >= 0
        is_new[is_new.clone()] = ~self.checked[rows[is_new]]
        new = rows[is_new]
        self.checked[new] = True
        features, width = self.recording.features[new], self.spec.target_hidden_size
        expected_features = self.features[: len(rows)][is_new].split(width, dim=-1)
        taps = zip(self.spec.taps, features.split(width, dim=-1), expected_features, strict=True)
        for tap, got, expected in taps:
            self._compare(f"tap of layer {tap}", got, expected, expected)
        expected_z = self.z[: len(rows)][is_new]
        self._compare(
            "context Z", self.recording.z[new], self.drafter.context(features), expected_z
        )

    def _engine_context(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the fused context by position, [C, H]: the engine's, or else the reference's."""
        mine, z = self.recording.z, self.z[: len(rows)]
        return torch.where((rows >= 0)[:, None], mine[rows.clamp(min=0)], z) if len(mine) else z

    def _compare_block(
        self, step: DraftStep, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the stages from the block's tokens to its logits.

        Returns:
            The reference's hidden states [K, H] and logits [K, V'] of the rows that predict.
        """
        target, length = self.oracle.target, len(rows)
        ids = torch.full_like(step.input_ids, self.spec.mask_token_id).long()
        ids[0] = self.recording.token_ids[length]
        positions = torch.arange(length, length + len(ids))
        wrong = (step.input_ids != ids) | (step.positions != positions)
        self._observe("block rows", wrong.float().mean().item())

        embedding = self.drafter.embed(ids, target)
        alone = self.drafter.embed(step.input_ids.long(), target)
        self._compare("embedding", step.embedding, alone, embedding)
        layers, hidden = self.oracle.block(embedding, self.z[:length])
        layers_alone, hidden_alone = self.oracle.block(
            step.embedding, self._engine_context(rows), fed=[step.embedding, *step.layers]
        )
        of_layers = zip(step.layers, layers_alone, layers, strict=True)
        for number, (got, alone, expected) in enumerate(of_layers):
            self._compare(f"layer {number}", got, alone, expected)
        self._compare("final norm", step.hidden, hidden_alone, hidden)
        logits = self.drafter.logits(hidden[self.spec.first_draft_row :], target)
        found = [self.drafter.logits(step.hidden[self.spec.first_draft_row :], target), logits]
        if self.spec.lilicorr is not None:
            found = [one.log_softmax(-1) for one in found]
        alone, expected = (
            one if step.candidates is None else one.gather(-1, step.candidates) for one in found
        )
        self._compare("logits", step.logits, alone, expected)
        return hidden[self.spec.first_draft_row :], logits

    def _compare_drafts(
        self,
        step: DraftStep,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        mine = step.logits
        if step.candidates is not None:  # the engine's logits are only those of candidates
            mine = self.drafter.logits(step.hidden[self.spec.first_draft_row :], self.oracle.target)
        alone = self._gap(
            step, step.hidden[self.spec.first_draft_row :], mine, self._engine_context(rows)[-1]
        )
        self._observe("drafts", alone, self._gap(step, hidden, expected, self.z[len(rows) - 1]))

    def _gap(
        self, step: DraftStep, hidden: torch.Tensor, logits: torch.Tensor, newest: torch.Tensor
    ) -> float:
        """Return how far the engine's drafts score below the best tokens; see `gap_to_best`.

        Scores follow from hidden states [K, H], logits [K, V'] and newest context [H]; those of
        candidates are given the engine's own previous draft. 1 if a draft is not a candidate.
        """
        before = torch.cat([step.input_ids[:1].long(), step.drafts[:-1].long()])
        tokens, scores = self.oracle.scores(logits, hidden, before, newest)  # [K, C]
        is_drafted = tokens == step.drafts[:, None]
        if not is_drafted.any(-1).all():
            return 1.0
        return gap_to_best(scores, is_drafted.int().argmax(-1))

    def _compare_acceptance(
        self, step: DraftStep, length: int, hidden: torch.Tensor, logits: torch.Tensor
    ) -> None:
        if step.num_accepted == NOT_VERIFIED:
            self._observe("acceptance", 1.0)
            return
        verified = self.recording.token_ids[length + 1 : length + 1 + step.num_drafted]
        by_text = count_matches(step.drafts, verified)
        self._observe("acceptance", float(step.num_accepted != by_text))
        newest, target = self.z[length - 1], self.oracle.target
        of_reference = self.drafter.choose(logits, hidden, int(step.input_ids[0]), newest, target)
        self.acceptance.engine.append(step.num_accepted)
        self.acceptance.reference.append(count_matches(of_reference, verified))


def count_matches(drafts: torch.Tensor, tokens: list[int]) -> int:
    """Return how many of the drafts [K] are accepted if `tokens` are the target's."""
    wanted = torch.tensor(tokens[: len(drafts)], dtype=drafts.dtype)
    return int((drafts[: len(wanted)] == wanted).cumprod(0).sum())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of any row: its largest difference over its largest number.

    Errors are relative to the row because some rows of targets (the first token's) are a thousand
    times as large as others, which would hide errors in the rest. Infinite if a number is not
    finite.

    Args:
        got: [..., N].
        expected: same shape.
    """
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(expected.shape)}")
    difference = (got.float() - expected.float()).abs().amax(-1)
    least = torch.finfo(torch.float32).tiny
    errors = difference / expected.float().abs().amax(-1).clamp(min=least)
    # A finite row that should be zero has a huge error, not an infinite one.
    errors = torch.where(difference.isfinite(), errors.clamp(max=1 / least), errors)
    return _worst(errors)


def gap_to_best(logits: torch.Tensor, columns: torch.Tensor) -> float:
    """Return how far the chosen logit lies below the row's best, in the worst row.

    Relative to the row's largest absolute logit. 0 if every choice is the most likely, or tied.

    Args:
        logits: [K, V].
        columns: chosen column per row, [K].
    """
    logits = logits.float()
    chosen = logits.gather(-1, columns.long()[:, None])[:, 0]
    return _worst((logits.amax(-1) - chosen) / logits.abs().amax(-1))


def _worst(errors: torch.Tensor) -> float:
    worst = errors.max().item() if errors.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf
