"""The proposer for vLLM's V1 model runner: context every step, drafts where there is room."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, replace
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.drafter.model import DFlashDraftModel
from vllm_dflash.options import DFlashOptions
from vllm_dflash.runner.block_layout import (
    BlockInputs,
    block_inputs,
    bonus_tokens,
    draft_lengths,
    kept_rows,
    split_drafts,
)
from vllm_dflash.runner.statistics import DraftStatistics


class DFlashProposer(SpecDecodeBaseProposer):
    """Drafts a block per request in one forward; replaces vLLM's class of the same name.

    Every step: store the context of all scheduled tokens the target did not reject, then draft
    for the requests that can use drafts. Where none can, nothing but the context is computed.

    Written for synchronous scheduling, which is what the V1 runner does on CPUs: the ragged
    lists it returns tell the scheduler each request's length.
    """

    model: DFlashDraftModel
    runner: GPUModelRunner

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, pass_hidden_states_to_model=True, runner=runner)
        self.spec = DFlashOptions.of(vllm_config).drafter
        self.runner = runner
        self.statistics = DraftStatistics()
        self.length_limit = min(
            self.max_model_len, self.draft_model_config.max_model_len or self.max_model_len
        )
        self.max_query_tokens = self.max_batch_size * (1 + self.num_speculative_tokens)
        # The base class's buffers for models that draft token by token.
        self.parallel_drafting_hidden_state_tensor = None

    # --- start-up -------------------------------------------------------------------------

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        attention = replace(base.attention_config, use_non_causal=not all(self.spec.causal))
        return replace(base, attention_config=attention)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        self.model.share_vocabulary(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        """The head came with the embedding."""

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the drafter's cache group, and build metadata for each kind of layer in it."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        whole = self.draft_attn_groups[0]
        # Attention metadata carries causality and is scheduled for one window, so layers that
        # differ in either need their own.
        layers_by_kind: dict[tuple[int | None, bool], list[str]] = defaultdict(list)
        for attention, window, causal in zip(
            self.model.context.attentions, self.spec.windows, self.spec.causal, strict=True
        ):
            layers_by_kind[window, causal].append(attention.attn.layer_name)
        self._groups_with_causality = []
        for (_, causal), layer_names in layers_by_kind.items():
            group = AttentionGroup(
                whole.backend, layer_names, whole.kv_cache_spec, self.kv_cache_gid
            )
            group.create_metadata_builders(
                self.vllm_config,
                self.device,
                kernel_block_sizes[self.kv_cache_gid] if kernel_block_sizes else None,
            )
            self._groups_with_causality.append((group, causal))

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Profile and compile: the largest context and the largest block, writing nothing."""
        width = len(self.spec.taps) * self.spec.target_hidden_size
        features = torch.zeros(num_tokens, width, dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.context.project(features, positions)
        num_queries = min(num_tokens, self.max_query_tokens)
        hidden = self._run_block(None, {}, self.input_ids[:num_queries], positions[:num_queries])
        self.model.compute_logits(hidden)

    # --- every step -----------------------------------------------------------------------

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bonus token and number of tokens each request really got, [R] each.

        Unlike vLLM's own, looks no token up for requests still in their prompt: those are not
        drafted, so their bonus token is never read.
        """
        bonus, counts = bonus_tokens(
            sampled_token_ids.numpy(),
            discard_request_mask.numpy()[: len(sampled_token_ids)],
            gpu_input_batch.vocab_size,
        )
        return torch.from_numpy(bonus), torch.from_numpy(counts)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, None, torch.Tensor]:
        """The batch as it is, and how many drafts of each request were rejected, [R].

        Also the one place that sees what became of the drafts.
        """
        drafted = np.array(spec_decode_metadata.num_draft_tokens, dtype=np.int32)
        produced = valid_sampled_tokens_count.numpy()
        self.statistics.observe_verification(drafted, produced)
        rejected = np.where(drafted > 0, drafted + 1 - produced, 0)
        return common_attn_metadata, None, torch.from_numpy(rejected)

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    ) -> list[list[int]]:
        """Store this step's context and draft the next tokens.

        Args:
            num_speculative_tokens: K for this step.
            target_positions: of this step's T scheduled rows, [T].
            target_hidden_states: taps concatenated in ascending layer order, [T, m * H].
            next_token_ids: the bonus token of each request, [R].
            common_attn_metadata: of the target's batch, rejected rows included.
            num_rejected_tokens_gpu: rejected rows at each request's end, [R]; None if no
                drafts were verified.

        Returns:
            Drafts of each request, empty where none can be used.
        """
        self.statistics.steps += 1
        batch = common_attn_metadata
        num_rejected = np.zeros(batch.num_reqs, dtype=np.int32)
        if num_rejected_tokens_gpu is not None:
            num_rejected = num_rejected_tokens_gpu.numpy()
        self._store_context(target_positions, target_hidden_states, batch, num_rejected)

        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        lengths = draft_lengths(
            context_lens,
            self._length_limits(batch.num_reqs),
            num_speculative_tokens,
            ~self.runner.discard_request_mask.np[: batch.num_reqs],
        )
        drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        if not lengths.any():
            return drafts
        self.statistics.drafted_steps += 1
        inputs = block_inputs(
            context_lens,
            lengths,
            next_token_ids.numpy(),
            self.spec.mask_token_id,
            batch.block_table_tensor.numpy(),
            self.block_size,
        )
        for request, tokens in zip(inputs.requests, self._draft(inputs, batch), strict=True):
            drafts[request] = tokens
        return drafts

    def _store_context(
        self,
        positions: torch.Tensor,
        features: torch.Tensor,
        batch: CommonAttentionMetadata,
        num_rejected: np.ndarray,
    ) -> None:
        slots = batch.slot_mapping[: len(features)]
        rows: slice | torch.Tensor
        if num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(batch.query_start_loc_cpu.numpy(), num_rejected))
        else:  # what is kept is in one piece, so nothing need be copied
            rows = slice(len(features) - int(num_rejected[-1]))
        self.model.context.store(features[rows], positions[rows], slots[rows])

    def _length_limits(self, num_reqs: int) -> np.ndarray:
        """Tokens each request may come to: its own end or the context limit, [R]."""
        limits = np.full(num_reqs, self.length_limit, dtype=np.int64)
        for row, req_id in enumerate(self.runner.input_batch.req_ids[:num_reqs]):
            request = self.runner.requests[req_id]
            if request.sampling_params is not None and request.sampling_params.max_tokens:
                end = request.num_prompt_tokens + request.sampling_params.max_tokens
                limits[row] = min(limits[row], end)
        return limits

    def _draft(self, inputs: BlockInputs, batch: CommonAttentionMetadata) -> list[list[int]]:
        """Run the blocks and take each row's argmax. Returns drafts of the D requests."""
        widths = np.diff(inputs.query_start_loc)
        query_start_loc = torch.from_numpy(inputs.query_start_loc)
        slots = torch.from_numpy(inputs.slots)
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(inputs.seq_lens),
            seq_lens_cpu_upper_bound=torch.from_numpy(inputs.seq_lens),
            num_reqs=len(inputs.requests),
            num_actual_tokens=len(slots),
            max_query_len=int(widths.max()),
            max_seq_len=int(inputs.seq_lens.max()),
            block_table_tensor=batch.block_table_tensor[torch.from_numpy(inputs.requests)],
            slot_mapping=slots,
        )
        hidden = self._run_block(
            self._attention_metadata(metadata),
            dict.fromkeys(self._draft_attn_layer_names, slots),
            torch.from_numpy(inputs.input_ids),
            torch.from_numpy(inputs.positions),
        )
        logits = self.model.compute_logits(hidden[torch.from_numpy(inputs.mask_rows)])  # [Q - D, V]
        best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
        drafts = split_drafts(tokens.tolist(), np.isfinite(best.float().numpy()), widths - 1)
        self.statistics.nan_drafts += len(tokens) - sum(map(len, drafts))
        return drafts

    def _attention_metadata(self, metadata: CommonAttentionMetadata) -> dict[str, object]:
        per_layer: dict[str, object] = {}
        for group, causal in self._groups_with_causality:
            metadata.causal = causal
            built = group.build_metadata_for_drafting(metadata, draft_index=0)
            per_layer |= dict.fromkeys(group.layer_names, built)
        return per_layer

    def _run_block(
        self,
        attn_metadata: dict[str, object] | None,
        slot_mapping: dict[str, torch.Tensor],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=len(input_ids),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slot_mapping,
        ):
            return self.model(input_ids, positions)
