"""Verifies drafts by drawing the tokens that plain decoding would draw.

At each row, after the bonus token and after each draft, vLLM's own function draws what its sampler
would draw there: from the target's logits, with the noise of the request's seed and of the row's
position. A draft is accepted if it is the token drawn before it; the first draw that is no draft is
the bonus token. So no draw depends on a draft. With a seed, the text is plain decoding's, token for
token, at any temperature and whatever is drafted.

That takes five launches: one gathers rows, three draw, one accepts. So do steps without drafts.
Drafts may be drawn with the same noise, so that more are accepted (`draft_noise.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled

from vllm_dflash.engine.v2.drawing_kernels import Verified, accept
from vllm_dflash.engine.vllm_fixes.repeated_uploads import UploadingSampler
from vllm_dflash.engine.vllm_fixes.scored_verification import ScoringVerifier


def sample_by_drawing(runner: GPUModelRunner) -> bool:
    """Replace the runner's samplers (hook "drawing verifier"), in a worker whose models are loaded.

    Not if ranks share the sampling of a batch, since vLLM sizes their messages for its own, or if
    the model or a watermark has its own sampler. Returns whether drafts are verified by drawing.
    """
    kinds = type(runner.sampler), type(runner.rejection_sampler)
    if runner.parallel_config.enable_batch_sharded_sampling or kinds != (Sampler, RejectionSampler):
        return False
    sampler = runner.sampler = DrawingSampler.instead_of(runner.sampler)
    verifier = runner.rejection_sampler = DrawingVerifier.instead_of(runner.rejection_sampler)
    verifier.sampler = sampler
    verifier.warm_up(runner.vocab_size, runner.dtype)
    return verifier.draws


def draw_and_accept(
    sampler: Sampler,
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    *,
    width: int,
    seq_lens: torch.Tensor | None = None,
) -> Verified:
    """Draw a token after each of Q rows, and accept the drafts of R requests.

    Args:
        sampler: has the parameters of all slots.
        logits: logits to draw from, [Q, V].
        row_slots: slot of each row's request, [Q].
        drafts: token of each row; -1 is never accepted, [Q].
        positions: position of each row, [Q].
        ends: 0, then where each request's rows end, [R + 1].
        slots: slot of each request, [R].
        width: most tokens of a request, 1 + W.
        seq_lens: length of each request; those still in their prompts get no token. None: vLLM sees
            to that.
    """
    states = sampler.sampling_states
    drawn = gumbel_sample(
        logits,
        row_slots,
        states.temperature.gpu,
        states.seeds.gpu,
        positions,
        apply_temperature=False,  # the logits have it
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )
    batch = drafts, ends, slots, seq_lens, sampler.req_states.prefill_len.gpu
    return accept(drawn, *batch, vocab_size=logits.shape[1], width=width)


def draw_batch(
    sampler: Sampler, verify: Callable[..., Verified], logits: torch.Tensor, batch: InputBatch
) -> SamplerOutput:
    """Draw the tokens of a batch that wants nothing else."""
    drafts, positions = gather_draft_sampled(
        batch.input_ids,
        batch.positions,
        batch.logits_indices,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        sampler.req_states.prefill_len.gpu,
    )
    found = verify(
        logits,
        batch.expanded_idx_mapping,
        drafts,
        positions,
        batch.cu_num_logits,
        batch.idx_mapping,
        seq_lens=batch.seq_lens,
    )
    return SamplerOutput(
        sampled_token_ids=found.sampled,
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=found.num_sampled,
        num_rejected=found.num_rejected,
        sampling_mask_tensors=None,
    )


class InsteadOfVllm:
    """Base of samplers that replace vLLM's in a runner."""

    @classmethod
    def instead_of(cls, replaced: Any) -> Self:
        """Make a sampler with the state of vLLM's."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(replaced))
        return made


class DrawingSampler(InsteadOfVllm, UploadingSampler):
    """vLLM's sampler; draws as verification does in steps that ask for nothing but tokens."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Turn the logits of R requests, [R, V], into a token for each."""
        if self.wants_only_tokens(input_batch.idx_mapping_np):
            verify = functools.partial(draw_and_accept, self, width=1)
            return draw_batch(self, verify, logits, input_batch)
        return super().__call__(logits, input_batch)

    def wants_only_tokens(self, slots: np.ndarray) -> bool:
        """Whether a batch in these slots needs no more than a draw from logits as they are."""
        return not (
            self.compute_nans
            or self.return_sampling_mask
            or self.trace_replay_state is not None
            or self.needs_logits_processing[slots].any()
            or self.sampling_states.num_logprobs[slots].max() != NO_LOGPROBS
            or self.logprob_token_ids_state.max_num_token_ids(slots)
        )


class DrawingVerifier(InsteadOfVllm, ScoringVerifier):
    """Draws where vLLM's verifier would sample by rejection, and only there: what it does before
    and after that, for example log-probabilities, stays."""

    sampler: DrawingSampler
    draws = False
    """Whether to draw: not if the user asks for another method of vLLM's."""

    @classmethod
    def instead_of(cls, replaced: Any) -> Self:
        """Make a verifier with the state of vLLM's."""
        made = super().instead_of(replaced)
        made.draws = (
            replaced.synthetic_conditional_rates is None
            and not replaced.use_block_verification
            and not getattr(replaced, "fly_window_size", 0)  # vLLM 0.33
        )
        return made

    def warm_up(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Compile the kernels, for logits as they are and as changed by a request's parameters."""
        prefill_lens = self.sampler.req_states.prefill_len.gpu
        zeros = torch.zeros(16, dtype=torch.int64, device=prefill_lens.device)
        ids, ends = zeros.int(), torch.arange(2, dtype=torch.int32, device=prefill_lens.device)
        for count in (1, 2, 16):  # vLLM's kernel is another for one row, and for a multiple of 16
            rows = zeros[:count]
            gather_draft_sampled(ids, zeros, rows, rows, ids[:count], prefill_lens)
        for kind in (dtype, torch.float32):
            logits = torch.zeros(2, vocab_size, dtype=kind, device=zeros.device)
            # vLLM verifies large batches in parts, which begin at any row.
            for row in (slice(0, 1), slice(1, 2)):
                batch = logits[row], zeros[row], ids[row], zeros[row], ends, zeros[:1]
                self.verify(*batch)
                self.verify(*batch, seq_lens=ids[:1])
                draw_and_accept(self.sampler, *batch, width=1, seq_lens=ids[:1])

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Turn logits of all sampled rows into tokens [R, 1 + W]; arguments as in vLLM."""
        slots = input_batch.idx_mapping_np
        is_simple = draft_logits is None and invalid_drafts is None
        if self.draws and is_simple and self.sampler.wants_only_tokens(slots):
            return draw_batch(self.sampler, self.verify, logits, input_batch)
        self.most_scored = self.sampler.logprob_token_ids_state.max_num_token_ids(slots)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, draft_logits, draft_sampled, pos, ends, slots, slots_np = arguments[:7]
        row_slots, local_pos, seq_lens_np, drafts = arguments[7:]
        self.row_slots = row_slots
        if not self.draws or draft_logits is not None:
            return super()._verify(*arguments)
        logits = self.sampler.apply_sampling_params(
            logits, row_slots, slots, slots_np, pos, draft_sampled, local_pos, seq_lens_np
        )
        found = self.verify(logits, row_slots, drafts, pos, ends, slots)
        return logits, found.sampled, found.num_sampled

    def verify(self, *batch: torch.Tensor, **where: Any) -> Verified:
        """Draw a token after each row, and accept drafts; arguments as of `draw_and_accept`."""
        width = 1 + self.num_speculative_steps
        return draw_and_accept(self.sampler, *batch, width=width, **where)
