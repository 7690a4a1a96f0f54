"""Decides which engines and which requests may have draft trees. All others get chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

import numpy as np
from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_dflash.config.engine_options import tree_sizes
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.planning import Ints

NEED_CHAINS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "logprobs",
    "logprob_token_ids",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "extra_args",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
"""Settings with which sampling depends on more than the row's logits, or vLLM's sampler expects a
request's rows to be consecutive tokens."""
PLAIN = SamplingParams()


def may_branch(params: SamplingParams | None) -> bool:
    """Whether a request's drafts may be a tree."""
    return params is not None and all(
        getattr(params, name, None) == getattr(PLAIN, name, None) for name in NEED_CHAINS
    )


def why_chains(config: VllmConfig) -> str | None:
    """Reason why no drafts of an engine can be trees, whatever its layers; None if they can.

    Reasons that follow from its settings alone are found before it starts: `config/pair.py`.
    """
    parallel, speculative = config.parallel_config, config.speculative_config
    assert speculative is not None
    for is_so, why in (
        (getattr(parallel, "use_ubatching", False), "batches are run in parts"),
        (
            config.kv_transfer_config is not None,
            "a KV connector reads K/V from the cache before it is known which nodes are accepted",
        ),
        (config.model_config.uses_mrope, "the target's positions have several dimensions"),
        (
            getattr(getattr(config, "aux_output_config", None), "enabled", False),
            "routed experts are returned for consecutive rows",
        ),
        (
            bool(config.model_config.logits_processors)
            or bool(entry_points(group="vllm.logits_processors")),  # vLLM finds these by itself
            "logits processors need a request's rows to be consecutive tokens",
        ),
        (
            speculative.rejection_sample_method != "standard",
            f"rejection_sample_method is {speculative.rejection_sample_method!r}",
        ),
        (
            getattr(parallel, "enable_batch_sharded_sampling", False),
            "enable_batch_sharded_sampling is on",
        ),
        (getattr(config.model_config, "return_sampling_mask", False), "return_sampling_mask is on"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "contexts are split among ranks",
        ),
        (
            envs.VLLM_BATCH_INVARIANT,
            "sums over a context depend on who else is in the batch (VLLM_BATCH_INVARIANT)",
        ),
        (
            config.compilation_config.pass_config.fuse_attn_quant,
            "attention quantises its output",
        ),
        (config.cache_config.kv_sharing_fast_prefill, "kv_sharing_fast_prefill is on"),
        (
            config.model_config.rswa_window is not None,
            "windows count from the end of the prompt",
        ),
    ):
        if is_so:
            return why
    return None


class PlacesOfTrees:
    """Counts the places that the scheduler keeps for nodes, if a request's drafts may be a tree."""

    def __init__(self, num_nodes: int) -> None:
        """Allow trees of up to `num_nodes`; 0: all drafts are chains."""
        self.num_nodes = num_nodes
        *self._cuts, _ = tree_sizes(num_nodes)
        self._may_branch: dict[str, bool] = {}

    def places(
        self,
        chains: Ints,
        names: Sequence[str],
        requests: Mapping[str, Request],
        context_lens: Ints,
        ends: Ints,
        most_rows: int,
    ) -> Ints:
        """Places for each request's drafts, with trees of each of S sizes, [S, R].

        Args:
            chains: places with chains; a request with 0 gets 0, [R].
            names: ids of the R requests.
            requests: unfinished requests by id.
            context_lens: tokens of context of each request, [R].
            ends: maximum length of each request, in tokens, [R].
            most_rows: maximum rows of a step; vLLM leaves out requests that do not fit.
        """
        may = np.array([self._can_branch(name, requests) for name in names])
        room = min(self.num_nodes, most_rows // len(names) - 1)
        limits = draft_limits(context_lens, ends, room, may)
        whole = np.where((chains > 0) & may, np.maximum(limits, chains), chains)
        return np.array(
            [*(np.where(may, np.minimum(whole, cut), whole) for cut in self._cuts), whole]
        )

    def _can_branch(self, name: str, requests: Mapping[str, Request]) -> bool:
        found = self._may_branch.get(name)
        if found is None:
            if len(self._may_branch) > 2 * len(requests):
                self._may_branch = {n: may for n, may in self._may_branch.items() if n in requests}
            request = requests.get(name)
            found = request is not None and may_branch(request.sampling_params)
            self._may_branch[name] = found
        return found
