"""Step 3 of 3: the DFlash drafter, trained on the target's own continuations."""

import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from demo_pair.target import learning_rate, make_optimizers, step_all
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.model.reference import ReferenceDrafter

BLOCK_SIZE = 8
TAPS = [1, 3, 4]
NUM_LAYERS = 3
ANCHORS = 24
BATCH_SIZE = 16
# Of DFlash 2: rows that a convolution reads, channels that share a correction, and its selector.
DFLASH2 = {"conv_kernel_size": 4, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8}
# Of LiLiCorr: its convolutions, and a small transformer over all candidates of a block.
LILICORR = {
    "conv_kernel_size": 4,
    "conv_group_size": 16,
    "lilicorr_candidate_topk": 8,
    "lilicorr_hidden_size": 64,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 4,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 32,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 10.0,
}
# What a config says of each, with MLPs of a width that makes all drafters as large.
ARCHITECTURES: dict[str, tuple[str, dict, int]] = {
    "dflash": ("DFlashDraftModel", {}, 768),
    "dflash2": ("DFlash2DraftModel", DFLASH2, 624),
    "lilicorr": ("LiLiCorrDraftModel", LILICORR, 624),
}
UNARY_SHARE = 0.5
# The paper weighs the k-th drafted token by exp(-(k - 1) / gamma): an early miss costs most.
GAMMA = 4.0

Pair = tuple[list[int], list[int]]


def drafter_config(target: Qwen3ForCausalLM, mask_token_id: int, architecture: str) -> dict:
    """A z-lab-format `config.json` for a drafter of this target."""
    written, own, intermediate_size = ARCHITECTURES[architecture]
    names = ["vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"]
    names += [
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
        "hidden_act",
    ]
    return {
        "architectures": [written],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": TAPS, **own},
        "num_hidden_layers": NUM_LAYERS,
        "num_target_layers": target.config.num_hidden_layers,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "intermediate_size": intermediate_size,
        **{name: getattr(target.config, name) for name in names},
    }


def make_batch(
    pairs: list[Pair], rng: random.Random, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad sequences and cut ANCHORS blocks at random places of each continuation.

    Returns token ids [R, T], query positions [R, A * B], block ids [R, A * B] and labels
    [R, A * B] (-100 where there is nothing to predict).
    """
    length = max(len(p) + len(c) for p, c in pairs)
    ids = torch.zeros(len(pairs), length, dtype=torch.long)
    anchors = torch.zeros(len(pairs), ANCHORS, dtype=torch.long)
    ends = torch.zeros(len(pairs), dtype=torch.long)
    for row, (prompt, continuation) in enumerate(pairs):
        sequence = prompt + continuation
        ids[row, : len(sequence)] = torch.tensor(sequence)
        ends[row] = len(sequence)
        choices = range(len(prompt), len(sequence) - 1)
        anchors[row] = torch.tensor(sorted(rng.choices(choices, k=ANCHORS)))
    positions = (anchors[:, :, None] + torch.arange(BLOCK_SIZE)).flatten(1)  # [R, A * B]
    tokens = ids.gather(1, positions.clamp(max=length - 1))
    is_anchor = torch.arange(BLOCK_SIZE).repeat(ANCHORS) == 0
    labels = tokens.masked_fill(is_anchor | (positions >= ends[:, None]), -100)
    return ids, positions, tokens.masked_fill(~is_anchor, mask_token_id), labels


def visible_keys(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Each block sees the context before its anchor and itself: [R, 1, A * B, T + A * B]."""
    anchors = positions[:, ::BLOCK_SIZE].repeat_interleave(BLOCK_SIZE, dim=1)  # [R, A * B]
    context = torch.arange(length) < anchors[:, :, None]
    number = torch.arange(positions.shape[1]) // BLOCK_SIZE
    block = (number[:, None] == number).expand(len(positions), -1, -1)
    return torch.cat([context, block], dim=2)[:, None]


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of [R, A * B, V] logits, by place in the block."""
    weight = weights * (labels != -100)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (loss.view_as(labels) * weight).sum() / weight.sum()


def lattice_loss(
    scores: torch.Tensor, candidates: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of LiLiCorr's scores [N, w, C before, C]: each token behind the right one before it.

    Counts as far as all tokens from the block's first on are candidates [N, w, C]. Labels are
    [N, w]; weights, by place, [w].

    Returns:
        The loss, and which tokens would have been chosen right, [N, w].
    """
    is_right = candidates == labels[..., None]
    right = is_right.int().argmax(-1)
    before = F.pad(right[:, :-1], (1, 0))  # in the first place, all rows are alike
    given = scores.gather(2, before[..., None, None].expand(-1, -1, 1, scores.shape[-1]))[:, :, 0]
    inside = is_right.any(-1).int().cumprod(-1)
    loss = F.cross_entropy(given.flatten(0, 1), right.flatten(), reduction="none").view_as(inside)
    weight = inside * weights
    return (loss * weight).sum() / weight.sum().clamp(min=1), (given.argmax(-1) == right) * inside


def train_drafter(
    target_folder: Path,
    pairs: list[Pair],
    mask_token_id: int,
    out: Path,
    *,
    architecture: str = "dflash",
    minutes: float,
    steps: int | None = None,
    start: Path | None = None,
    progress: Progress,
) -> None:
    """Train for `minutes` of wall time and save a z-lab-format checkpoint in bf16.

    Or for so many `steps`, which other programs on the same cores do not make fewer. From the
    layers of the drafter in the folder `start`, if there is one.
    """
    pairs = [pair for pair in pairs if len(pair[1]) > BLOCK_SIZE]
    target = Qwen3ForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16).eval()
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    config = drafter_config(target, mask_token_id, architecture)
    torch.manual_seed(0)
    rng = random.Random(0)
    drafter = ReferenceDrafter(parse_config(str(out), config))
    if start is not None:
        known = drafter.state_dict()
        layers = load_file(start / "model.safetensors")
        drafter.load_state_dict({k: v for k, v in layers.items() if k in known}, strict=False)
    optimizers = make_optimizers(drafter, lr=3e-3)
    weights = torch.exp(-(torch.arange(BLOCK_SIZE) - 1) / GAMMA).repeat(ANCHORS)  # [A * B]
    task = progress.add_task("drafter", total=1.0)
    started = time.monotonic()
    step = 0
    average = None

    def done() -> float:
        return step / steps if steps else (time.monotonic() - started) / (minutes * 60)

    while (share := done()) < 1:
        ids, positions, block, labels = make_batch(
            rng.sample(pairs, BATCH_SIZE), rng, mask_token_id
        )
        with torch.no_grad():
            hidden = target.model(ids, output_hidden_states=True).hidden_states
            features = torch.cat([hidden[tap + 1] for tap in TAPS], dim=-1)  # [R, T, m * H]
            embeds = embed(block)
        everywhere = torch.arange(ids.shape[1]).expand(len(ids), -1)
        with torch.autocast("cpu", torch.bfloat16):
            context = drafter.context(features)  # [R, T, H]
            states = drafter(
                embeds,
                context,
                torch.cat([everywhere, positions], dim=1),
                visible_keys(positions, ids.shape[1]),
                BLOCK_SIZE,
            )
            logits = F.linear(states, head.weight)  # [R, A * B, V]
            chosen = logits
            if (selector := drafter.candidate_selector) is not None:
                # Each token behind the right one before it; of all tokens, not only candidates.
                before = ids.gather(1, (positions - 1).clamp(max=ids.shape[1] - 1))
                codes = selector.predecessor_codebook[before] * selector.hidden_projection(states)
                chosen = logits + F.linear(codes, selector.successor_codebook)
            if (lattice := drafter.lilicorr) is not None:
                rows, of_rows, wanted = (
                    one.unflatten(1, (ANCHORS, BLOCK_SIZE))[:, :, 1:].flatten(0, 1)
                    for one in (states, logits, labels)
                )  # [R * A, w, ...]
                candidates, log_probs = lattice.candidates(of_rows)
                newest = positions[:, ::BLOCK_SIZE, None] - 1  # before the block's first token
                newest = context.gather(1, newest.expand(-1, -1, context.shape[-1])).flatten(0, 1)
                scores = lattice.scores(embed(candidates), log_probs, rows, newest)
        loss = mean_loss(chosen, labels, weights)
        hits = (chosen.argmax(-1) == labels).view(-1, BLOCK_SIZE)[:, 1:]
        second = None
        if lattice is not None:
            second, hits = lattice_loss(scores, candidates, wanted, weights[1:BLOCK_SIZE])
        elif chosen is not logits:  # what makes the candidates
            second = mean_loss(logits, labels, weights)
        if second is not None:
            loss = (1 - UNARY_SHARE) * loss + UNARY_SHARE * second
        loss.backward()
        step_all(optimizers, drafter, 3e-3 * learning_rate(share))
        step += 1
        if step % 10 == 0:
            length = 1 + hits.long().cumprod(-1).sum(-1).float().mean().item()
            average = length if average is None else 0.95 * average + 0.05 * length
            progress.update(
                task,
                completed=share,
                description=f"drafter: step {step}, acceptance length {average:.2f}",
            )
            if step % 200 == 0:
                progress.console.print(f"drafter: step {step}, {average:.2f} in training")
    progress.console.print(f"drafter: {step} steps, {average:.2f} tokens a step in training")
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in drafter.named_parameters()
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
