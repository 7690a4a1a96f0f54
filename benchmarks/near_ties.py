"""How often bf16 texts differ because attention is added up in another order: near ties.

    scripts/run.sh python benchmarks/near_ties.py

A target that attends to draft trees computes attention in two parts, context and nodes, where
plain decoding's kernel does it in one. Both are right, but round differently. This writes the demo
pair's held-out texts greedily with one arithmetic, and counts the places where another one would
have chosen another token. All else is equal: PyTorch on a CPU, one row for each token.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from demo_models import DEMO, HELD_OUT
from vllm_dflash.tools.prompts import read_prompts

TEXTS, TOKENS, BLOCK = 24, 64, 4
KINDS = {
    "tiled": "as FlashAttention: weights rounded to bf16 before they are divided by their sum",
    "exact": "nothing rounded before the result",
    "parts": "context and the last rows of up to 4 apart, added in float32",
    "rounded parts": "the same, context's part rounded to bf16, as FlashAttention returns it",
}


def attend(
    kind: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **_more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally. `query` is [1, H, Q, D], `key` and `value` [1, H of K/V, T, D]."""
    repeats, dtype = query.shape[1] // key.shape[1], query.dtype
    keys, values = (one.repeat_interleave(repeats, 1).float() for one in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * scaling  # [1, H, Q, T]
    places = torch.arange(keys.shape[2])
    rows = places[-query.shape[2] :, None]
    seen = places <= rows
    if kind == "exact":
        found = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    elif kind == "tiled":
        found, _ = _part(scores, seen, values, dtype)
    else:
        is_node = seen & (places > rows - rows % BLOCK)
        context, context_sum = _part(scores, seen & ~is_node, values, dtype)
        nodes, nodes_sum = _part(scores, is_node, values, dtype)
        if kind == "rounded parts":
            context = context.to(dtype).float()
        share = torch.sigmoid(nodes_sum - context_sum)
        found = torch.lerp(context, nodes, share)
    return found.to(dtype).transpose(1, 2).contiguous(), None


def _part(
    scores: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to some keys: result [1, H, Q, D], and the logarithm of the sum of weights."""
    masked = scores.masked_fill(~seen, -torch.inf)
    most = masked.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (masked - most).exp()
    total = weights.sum(-1, keepdim=True)
    found = weights.to(dtype).float() @ values / total.clamp(min=1e-30)
    return found, most + total.log()


def log_probs(model: Any, text: torch.Tensor, start: int) -> torch.Tensor:
    """Return log-probabilities of all tokens from position `start` on, [N, V]."""
    logits: torch.Tensor = model(text).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def main() -> None:
    """Write the texts, and print a line for each arithmetic."""
    names = {kind: kind.replace(" ", "_") for kind in KINDS}
    for kind, name in names.items():
        ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, kind))
    load = partial(AutoModelForCausalLM.from_pretrained, DEMO / "target")
    models = {
        kind: load(dtype=torch.bfloat16, attn_implementation=name) for kind, name in names.items()
    }
    reference = load(dtype=torch.float32, attn_implementation="exact")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    measured: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in KINDS}
    for prompt in read_prompts(HELD_OUT, TEXTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = models["tiled"].generate(ids, max_new_tokens=TOKENS, do_sample=False)
        exact = log_probs(reference, text, ids.shape[1])
        plain = log_probs(models["tiled"], text, ids.shape[1])
        for kind, model in models.items():
            mine = log_probs(model, text, ids.shape[1])
            chosen = plain.gather(1, mine.argmax(-1)[:, None])[:, 0]
            regret = plain.amax(-1) - chosen
            differ = (mine.argmax(-1) != plain.argmax(-1)).sum()
            distance = (mine - exact).abs().amax(-1).mean()
            measured[kind].append((int(differ), float(regret.max()), float(distance)))
    for kind, texts in measured.items():
        counts, regrets, distances = zip(*texts, strict=True)
        result = {
            "texts that differ": sum(map(bool, counts)),
            "places": sum(counts),
            "largest regret": round(max(regrets), 3),
            "distance to float32": round(sum(distances) / len(texts), 4),
        }
        print(f"{kind} ({KINDS[kind]}): {json.dumps(result)}")


if __name__ == "__main__":
    main()
