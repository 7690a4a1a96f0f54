"""Decides how much to draft in every step, on both runners.

A batch of R requests yields R tokens in any case; drafts yield more, in a longer step. `plan`
weighs what drafts are expected to bring (`acceptance.py`) against what the step would take
(`costs.py`), and chooses the step with the best rate (`search.py`):

    V1    which requests get a block, how wide. Once blocks are there, `choose` takes each request's
          block or text, and cuts it where its drafts are no longer worth their time
    V2    whether all get a block or none, and how many drafts of each are verified. The device
          takes block or text

What is not done is not measured. So now and then a step goes against the plan: it verifies drafts
of requests whose drafts never were, or longest ago, or it drafts no request (`Probes`).

All of this sees the drafter's distribution and what became of earlier drafts, never a token that
was sampled for the draft's position. So the output distribution is that of verifying any drafts
(arXiv 2211.17192, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.acceptance import confidence_of_texts
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.learning import DraftLearner
from vllm_dflash.planning.probes import (
    LEAST_SHARE,
    PROBE_LENGTH,
    PROBE_SHARE,
    Probes,
    to_probe,
)
from vllm_dflash.planning.search import (
    Batch,
    best_drafted,
    best_first,
    best_lengths,
    first_best,
    perfect_rate,
    seconds_of,
    utility_of,
)
from vllm_dflash.planning.step import Plan, Predicted, StepRecord

MARGIN = 1.01
"""Ratio by which drafting must beat plain decoding, whose cost is known better."""
LEAST_LOST = 0.15
"""Least that a step against the plan is taken to cost where drafting pays, in plain steps."""


class Planner(DraftLearner):
    """State and decisions of one engine.

    With fixed lengths `start` is never called. Until then every step drafts K, or as many as a
    request can use, and nothing is learned; so all ranks decide the same by themselves. Afterwards
    they do not, because measured times differ.
    """

    costs: StepCosts

    def __init__(
        self,
        max_draft: int,
        max_requests: int,
        costs: StepCosts | None = None,
        *,
        most_free: int = 0,
    ) -> None:
        """Plan blocks of up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        Args:
            max_draft: K.
            max_requests: most requests of a batch.
            costs: V1: the costs to start from. None: V2, which starts later.
            most_free: V1: most drafts that a text predicts (F). On V2 it is K.
        """
        self.picks_requests = costs is not None
        """Whether some requests can get a block and others none (V1); on V2 all or none do."""
        super().__init__(max_draft, max_requests, most_free if self.picks_requests else max_draft)
        self.probes, self.checks = Probes(), Probes(share=LEAST_SHARE)
        self.beside = Probes(share=LEAST_SHARE)
        """V2: probes in steps that run a block anyway."""
        self.is_started = False
        if costs is not None:
            self.start(costs, range(1, max_draft + 1))

    def start(
        self, costs: StepCosts, choices: Iterable[int], *, ragged_seconds: float = 0.0
    ) -> None:
        """Choose by what steps cost from now on.

        Args:
            costs: costs of steps to start from.
            choices: V1: widths of blocks. V2: lengths that all requests of a step can be given;
                beyond K: for trees.
            ragged_seconds: extra time of a step whose requests have different lengths.
        """
        self.is_started, self.costs = True, costs
        self._choices = np.array(sorted({*choices} - {0}), dtype=np.int64)  # [C]
        """Widths of blocks (V1), or lengths that all requests of a step can share (V2)."""
        self._ragged_seconds = float(ragged_seconds)

    # --- before drafting ------------------------------------------------------------------------

    def plan(
        self,
        ids: Sequence[str],
        context_lens: Ints,
        max_drafts: Ints,
        *,
        predicted: Predicted | None = None,
        waiting: Ints | None = None,
        steps: int = 1,
    ) -> Plan:
        """Choose what to draft in a step of R requests. Learns nothing.

        Args:
            ids: ids of the requests, [R].
            context_lens: tokens of context of each, as far as is known, [R].
            max_drafts: most drafts of a block that each can use, [R].
            predicted: V1: what their texts predict.
            waiting: context rows of each that must be stored before it can be drafted, [R].
            steps: steps since the last plan.
        """
        count = len(ids)
        if not self.is_started or not count:
            return Plan(max_drafts > 0, int(max_drafts.max(initial=0)), max_drafts)
        rows = self.rows(ids)
        texts: Floats = np.zeros((count, 0), np.float64)
        if not self.picks_requests:
            texts = self.texts.expected(rows)
        elif predicted is not None:
            found = confidence_of_texts(predicted.matches, predicted.lengths, self.most_free)
            texts = self.texts.survival(rows, found)
        batch = Batch(
            context_lens,
            max_drafts,
            np.zeros(count, np.int64) if waiting is None else waiting,
            utility_of(texts),
            utility_of(self.blocks.expected(rows)),
        )
        plain_seconds = self.costs.plain(count, batch.context)
        plain = Plan.without_block(
            count,
            lengths=np.zeros(count, np.int64),
            utility_per_second=count / plain_seconds,
            rate=count / plain_seconds,
        )
        free = drafting = plain
        if batch.texts.size and batch.texts[:, 0].any():
            free = self._best_lengths(batch, batch.texts, 0.0, plain)
        if max_drafts.any() and self.picks_requests:
            # What is not known to pay yet is tried with few requests.
            known = int((self.blocks.num_observed[rows] > 0).sum())
            most = 1 + count // PROBE_SHARE + 2 * known
            drafting = best_drafted(self.costs, batch, free, self._choices, most)
        elif max_drafts.any():
            drafting = self._all_blocks(batch, free)
        best = max(free, drafting, key=lambda plan: plan.rate)
        best = best if best.rate > MARGIN * plain.rate else plain
        passed, least_lost = steps * plain_seconds, LEAST_LOST * plain_seconds
        if best.rate > plain.rate:
            lost = max((best.rate / plain.rate - 1.0) * plain_seconds, least_lost)
            is_new = not self.costs.has_seen_plain(count)
            if self.checks.are_due(passed, lost, is_new=is_new):
                return replace(plain, is_probe=True)
        return self._probe(rows, batch, best, passed, least_lost) or best

    def _all_blocks(self, batch: Batch, free: Plan) -> Plan:
        """Return the best step in which all requests get a block."""
        is_text = batch.texts.sum(axis=1) > batch.blocks.sum(axis=1)
        curves = np.where(is_text[:, None], batch.texts, batch.blocks)
        drafting = float(self.costs.blocks(batch.size, self.max_draft, batch.context))
        best = self._best_lengths(batch, curves, drafting, free)
        if not best.lengths.any():
            return free
        return replace(
            best,
            drafted=np.ones(batch.size, bool),
            width=self.max_draft,
            of_blocks=float(curves[~is_text].sum()),
            of_texts=float(curves[is_text].sum()),
        )

    def _best_lengths(self, batch: Batch, curves: Floats, drafting: float, otherwise: Plan) -> Plan:
        """Return the step with the best lengths for drafts of this utility, [R, w]; `drafting`:
        seconds of its blocks."""
        uniform = self._choices[:0] if self.picks_requests else self._choices
        world = self.costs, drafting, uniform, self._ragged_seconds
        if not self.picks_requests:  # on V1, a text's own end limits what it predicts
            within = np.arange(curves.shape[1]) < batch.max_drafts[:, None]
            curves = np.where(within, curves, 0.0)
        return best_lengths(batch, curves, otherwise, *world)

    def _probe(
        self, rows: Ints, batch: Batch, best: Plan, passed: float, least_lost: float
    ) -> Plan | None:
        """Return a plan that also verifies drafts that do not seem to pay, if it is time."""
        chosen = to_probe(batch, best, self.blocks.last_step[rows])
        is_beside = best.runs_block and not self.picks_requests
        if best.runs_block and (is_beside or not len(chosen)):  # blocks show what they are worth
            self.probes.restart()
        if not len(chosen):
            return None
        probe = self._probe_of(batch, best, chosen)
        lost = seconds_of(self.costs, batch, probe) - seconds_of(self.costs, batch, best)
        if is_beside:  # no more than some rows, which would be due in every plan
            lost = max(lost, least_lost)
        is_new = self.picks_requests and not self.blocks.num_observed[rows[chosen]].all()
        promise, probes = 0.0, self.beside if is_beside else self.probes
        if is_new or probes.share > LEAST_SHARE:  # else it would change nothing
            promise = max(perfect_rate(self.costs, batch) / best.rate - 1.0, 0.0)
        return probe if probes.are_due(passed, lost, is_new=is_new, promise=promise) else None

    def _probe_of(self, batch: Batch, best: Plan, chosen: Ints) -> Plan:
        """Return the plan with a block for the chosen requests too, of which some drafts are
        verified. On V2 all get a block; and if none would run and different lengths take longer,
        all verify some."""
        length, drafted, lengths = PROBE_LENGTH, best.drafted.copy(), best.lengths.copy()
        drafted[chosen if self.picks_requests else slice(None)] = True
        if self._ragged_seconds and not best.runs_block:
            chosen = np.flatnonzero(batch.max_drafts > 0)
            length = int(self._choices[np.searchsorted(self._choices, min(length, self.max_draft))])
        lengths[chosen] = np.maximum(lengths[chosen], np.minimum(length, batch.max_drafts[chosen]))
        return replace(best, drafted=drafted, width=self.max_draft, lengths=lengths, is_probe=True)

    def seconds(self, lengths: Ints, context_lens: Ints) -> Floats:
        """Return the seconds of a step of R requests and the block after it, for S plans, [S];
        `lengths`: each plan's draft slots, [S, R]."""
        count, context = len(context_lens), float(context_lens.sum())
        is_uniform = (lengths == lengths[:, :1]).all(axis=1) & np.isin(lengths[:, 0], self._choices)
        rows, reading = count + lengths.sum(axis=1), (lengths @ context_lens).astype(np.float64)
        found: Floats = self.costs.target(count, rows, context, reading)
        found = found + self.costs.blocks(count, self.max_draft, context)
        return found + np.where(is_uniform, 0.0, self._ragged_seconds)

    # --- V1, once blocks are there ----------------------------------------------------------------

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        """Take each request's block or text, and cut it to what pays.

        What was already spent on drafting is sunk.

        Args:
            step: has its plan, and `max_drafts` of the drafted requests, [R].
            confidence: probability of each drafted token under the drafter, [D, w].

        Returns:
            How many drafts of each request to verify, and whether they are its text's, [R].
        """
        if not self.is_started:
            return step.max_drafts, np.zeros(step.num_requests, bool)
        plan, rows, count = step.plan, self.rows(step.ids), step.num_requests
        confidence_of = np.zeros((count, self._confidence.shape[1]))  # of what is chosen
        utility = np.zeros_like(confidence_of)
        if step.predicted is not None:
            most, predicted = self.most_free, step.predicted
            found = confidence_of_texts(predicted.matches, predicted.lengths, most)
            confidence_of[:, :most] = found
            utility[:, :most] = utility_of(self.texts.survival(rows, found))
        is_text = utility[:, 0] > 0.0
        drafted, width = np.flatnonzero(plan.drafted), confidence.shape[1]
        if width:
            usable = np.arange(width) < step.max_drafts[drafted, None]
            own = utility_of(self.blocks.survival(rows[drafted], confidence * usable))
            takes = own.sum(axis=1) >= utility[drafted].sum(axis=1)
            takes |= plan.is_probe & (step.max_drafts[drafted] > 0)
            of_block = drafted[takes]
            for chosen, new in ((utility, own), (confidence_of, confidence)):
                chosen[of_block] = 0.0
                chosen[of_block, :width] = new[takes]
            is_text[of_block] = False
        requests, gain, seconds = best_first(
            self.costs, utility, step.context_lens, plan.utility_per_second
        )
        best = first_best(gain - plan.utility_per_second * seconds)
        lengths = np.bincount(requests[:best], minlength=count)
        if width and not step.repeats_plan:
            self.blocks.record_drafts(rows[drafted], confidence.cumprod(axis=1))
        if plan.is_probe:
            fewest = np.minimum(step.max_drafts, PROBE_LENGTH) * plan.drafted
            lengths = np.where(is_text, lengths, np.maximum(lengths, fewest))
        self._hand_over(rows, is_text, lengths, confidence_of)
        return lengths, is_text & (lengths > 0)

    # --- what steps were --------------------------------------------------------------------------

    def record_step(self, step: StepRecord) -> None:
        """Learn what a step cost, where that is known.

        On V2 its `target_seconds` include the block of `draft_rows`, which cannot be timed alone
        while the device keeps running.
        """
        if self.is_started and step.target_seconds:
            self.costs.record_step(step, includes_block=not self.picks_requests)
