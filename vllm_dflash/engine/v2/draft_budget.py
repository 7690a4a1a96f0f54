"""How many drafts of a step are verified where the device trims: vLLM's mechanism, our number.

vLLM splits a budget among the drafts of a batch on the device, by their chances. It takes that
budget from a table of times and from the chances of one step; ours comes from `planning/budget.py`,
by what steps take with the contexts at hand, and may be nothing.
"""

from __future__ import annotations

from itertools import product, repeat

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_dflash.engine.v2.exchange import Directions
from vllm_dflash.planning import Ints
from vllm_dflash.planning.budget import Load, RecentChances, best_budget
from vllm_dflash.planning.costs import StepCosts


class DraftBudget(AdaptiveVerificationManager):
    """Stands for vLLM's in a runner. All ranks decide alike: by like chances, and costs they are
    sent."""

    costs: StepCosts | None
    """What steps take; None until that is known."""
    directions: Directions
    """Of the step that runs."""
    recent: RecentChances
    _least: int
    """Drafts to verify whatever they seem worth: what the step before had directed."""
    _had_blocks: tuple[bool, bool]
    """Whether blocks were run in the last two steps, the older one first."""
    _steps: int
    _added: Ints
    """The step that a request was added in, by slot: until the second one behind it, chances that
    the host has are those of who had the slot before."""

    @classmethod
    def of(cls, whole: AdaptiveVerificationManager) -> DraftBudget:
        """One that is set up as vLLM's is."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(whole))
        made.costs, made.directions, made._least = None, Directions(False), 0
        states = whole.req_states
        made.recent = RecentChances(states.max_num_reqs, whole.num_speculative_steps)
        made._had_blocks = False, False
        made._steps, made._added = 0, np.full(states.max_num_reqs, -2)
        return made

    def expect(self, directions: Directions) -> None:
        """A step with these directions is about to run."""
        self._had_blocks = self._had_blocks[1], self.directions.runs_block
        self._least, self.directions = self.directions.least, directions
        self._steps += 1
        if self.costs is not None and directions.learned is not None:
            self.costs.records[:] = directions.learned.costs

    def add_request(self, req_idx: int) -> None:
        """A new request is in this slot: drafts that it comes with are placeholders."""
        self._confidence_probs[req_idx].fill_(0.0)
        self.recent.forget(req_idx)
        self._added[req_idx] = self._steps

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step, once its drafts are trimmed to the budget; vLLM's arguments."""
        if self.costs is None:
            return super().get_num_tokens(num_tokens_per_req, draft_tokens)
        names, states = list(num_tokens_per_req), self.req_states
        count = len(names)
        tokens = np.fromiter(num_tokens_per_req.values(), np.int32, count)
        given = map(len, map(draft_tokens.get, names, repeat(())))
        drafts = np.fromiter(given, np.int32, count)
        slots = np.fromiter(map(states.req_id_to_index.__getitem__, names), np.int64, count)
        # Chances of a step without a block say nothing of drafts that have one behind them.
        is_alike = self._had_blocks[0] == self._had_blocks[1]
        known = slots[is_alike & (self._steps - self._added[slots] >= 2)]
        self.recent.add(known, self._stale_confidences[self._stale_idx].np[known])
        others = tokens - drafts
        context = states.num_computed_tokens_np[slots]
        decodes = context + others >= states.prefill_len.np[slots]
        most = min(int(drafts.sum()), self._max_total_logits - count * self.num_bonus_tokens)
        budget = 0
        if most > 0 and decodes.any():
            load = Load(
                num_requests=int(decodes.sum()),
                rows=int(others.sum()),
                context=float(context[decodes].sum()),
                mean_context=float(context[drafts > 0].mean()),
                block_rows=self.directions.runs_block * count * (1 + self.num_speculative_steps),
            )
            scores, steps = self.recent.sample(slots, drafts)
            budget = best_budget(self.costs, load, scores, steps, most, self._least)
        self._batch_budget = (
            dict(zip(names, drafts.tolist(), strict=True)),
            dict(zip(names, others.tolist(), strict=True)),
            budget,
        )
        return int(others.sum()) + budget

    def warm_up(self) -> None:
        """vLLM compiles how it splits a budget when it first does that, for one and for several
        requests and drafts: here nobody waits for it."""
        width = self.num_speculative_steps
        for count, budget in product((1, 2), (1, 2)):
            capacities = self._batch_draft_capacity[:count].fill_(width)
            if budget < count * width:
                slots = torch.arange(count, device=capacities.device)
                adaptive_verification._assign_draft_token_budget_compiled(
                    self._confidence_probs, slots, capacities, budget, width
                )


def take_over_the_budget(runner: GPUModelRunner) -> DraftBudget | None:
    """Hook 17, before graphs are captured; None where the device does not trim."""
    if runner.adaptive_verification is None:
        return None
    runner.adaptive_verification = DraftBudget.of(runner.adaptive_verification)
    return runner.adaptive_verification
