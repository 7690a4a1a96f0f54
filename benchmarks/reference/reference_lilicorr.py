"""LiLiCorr's head in plain PyTorch (arXiv 2608.20530): how well one candidate follows another.

R blocks of w positions, C candidates for each; the lattice is all L = w * C of them. H is the
drafter's hidden size, N the head's.

    x = W_e E_target[candidate] + W_h hidden + MLP(log-probability features) + position + rank
    per layer:  x += attention(RMSNorm(x)) with a bias by distance;  x += MLP(RMSNorm(x))
    a = RMSNorm(W_a z)                           z: context of the token before the bonus token
    f = silu(W_f [x, a, x * a]);  out = unit(W_out f);  in = unit(W_in f)
    score(c | p) = s * out[p] . in[c]; in the first position, s * unit(W_first a) . in[c]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm_dflash.checkpoint.spec import DrafterSpec, LiLiCorr

FEATURES = 5
"""Features of a candidate: log-probability, probability, log of the ratio to the most likely one's,
rank from 0 to 1, and whether it is that one."""


class ReferenceMLP(nn.Module):
    """Up projection, SiLU and down projection, with biases."""

    def __init__(self, width: int, rows: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, rows), nn.Linear(rows, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class ReferenceLatticeLayer(nn.Module):
    """Attention among all candidates of a block, then an MLP."""

    def __init__(self, head: LiLiCorr, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(head.hidden_size, eps=eps)
        self.attn = nn.MultiheadAttention(head.hidden_size, head.num_heads, batch_first=True)
        self.mlp_norm = nn.RMSNorm(head.hidden_size, eps=eps)
        self.mlp = ReferenceMLP(head.hidden_size, head.mlp_size, head.hidden_size)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """[R, L, N] to [R, L, N]; `bias`: one per head, [heads, L, L]."""
        rows = self.attn_norm(x)
        each = bias.repeat(len(x), 1, 1)  # [R * heads, L, L]
        attended, _ = self.attn(rows, rows, rows, attn_mask=each, need_weights=False)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class ReferenceLattice(nn.Module):
    """Scores each position's candidates after those of the position before, all at once."""

    def __init__(self, spec: DrafterSpec, head: LiLiCorr) -> None:
        super().__init__()
        self.head = head
        hidden, width, eps = spec.hidden_size, head.hidden_size, spec.rms_norm_eps
        self.token_proj = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.context_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = ReferenceMLP(FEATURES, width, width)
        positions = spec.max_draft_tokens
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, positions, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, head.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(head.num_heads, 2 * positions + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(head.num_heads))
        self.layers = nn.ModuleList(
            ReferenceLatticeLayer(head, eps) for _ in range(head.num_layers)
        )
        self.output_norm = nn.RMSNorm(width, eps=eps)
        self.anchor_norm = nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, head.factor_dim)
        self.in_head = nn.Linear(width, head.factor_dim)
        self.anchor_out_head = nn.Linear(width, head.factor_dim)

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the most likely tokens and their log-probabilities, [..., C] each, from logits
        [..., V]."""
        most_likely = logits.float().log_softmax(-1).topk(self.head.candidate_topk)
        return most_likely.indices, most_likely.values

    def weigh(
        self, logits: torch.Tensor, hidden: torch.Tensor, newest: torch.Tensor, embed: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates of one block [w, C], and their scores [w, C before, C].

        Args:
            logits: logits of the whole vocabulary, [w, V].
            hidden: hidden states, [w, H].
            newest: fused context of the token before the bonus token, [H].
            embed: the target's embedding.
        """
        candidates, log_probs = self.candidates(logits)
        scores = self.scores(embed(candidates)[None], log_probs[None], hidden[None], newest[None])
        return candidates, scores[0]

    def scores(
        self,
        embeddings: torch.Tensor,  # [R, w, C, H], the target's
        log_probs: torch.Tensor,  # [R, w, C]
        hidden: torch.Tensor,  # [R, w, H]
        newest: torch.Tensor,  # [R, H]
    ) -> torch.Tensor:
        """Scores [R, w, C before, C]; in the first position, all C rows are the same."""
        blocks, positions, count = log_probs.shape
        rank = torch.linspace(0, 1, count, device=log_probs.device)
        features = [
            log_probs,
            log_probs.exp(),
            log_probs - log_probs[..., :1],
            rank.expand_as(log_probs),
            (rank == 0).to(log_probs).expand_as(log_probs),
        ]
        x = self.token_proj(embeddings) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(torch.stack(features, dim=-1).to(x)))
        x = x + self.slot_embedding[0, :, :positions] + self.rank_embedding[0]
        x, bias = x.flatten(1, 2), self._bias(positions)  # [R, L, N]
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (positions, count))
        anchor = self.anchor_norm(self.context_proj(newest))  # [R, N]
        a = anchor[:, None, None].expand_as(x)
        f = F.silu(self.factor_input_proj(torch.cat([x, a, x * a], dim=-1)))

        def unit(vectors: torch.Tensor) -> torch.Tensor:
            return F.normalize(vectors, dim=-1, eps=self.head.vector_eps)

        before, behind = unit(self.out_head(f)), unit(self.in_head(f))  # [R, w, C, factors]
        first = unit(self.anchor_out_head(anchor))[:, None, None]
        first = first.expand(blocks, 1, count, -1)
        cosines = torch.cat([first, before[:, :-1]], dim=1) @ behind.transpose(-1, -2)
        return self.head.logit_scale * cosines.float()

    def _bias(self, positions: int) -> torch.Tensor:
        """Bias of each head's attention by the distance of two positions, [heads, L, L]."""
        place = torch.arange(positions, device=self.same_slot_bias.device)
        place = place.repeat_interleave(self.head.candidate_topk)
        apart = place[:, None] - place
        middle = self.slot_embedding.shape[2]
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, apart + middle] + same


def walk(candidates: torch.Tensor, scores: torch.Tensor) -> list[int]:
    """Tokens of one block, from candidates [w, C] and their scores [w, C before, C]."""
    tokens, chosen = [], 0
    for ids, given in zip(candidates, scores, strict=True):
        chosen = int(given[chosen].argmax())
        tokens.append(int(ids[chosen]))
    return tokens
