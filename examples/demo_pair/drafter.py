"""Step 2 of 2: the DFlash drafter, trained on the target's own continuations."""

import json
from pathlib import Path

import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from drafter_training.continuations import Pair
from drafter_training.optimizers import cosine, muon_and_adamw
from drafter_training.sources import Live
from drafter_training.trainer import Trainer
from reference.reference_drafter import ReferenceDrafter
from vllm_dflash.checkpoint.read import parse_config

BLOCK_SIZE = 8
TAPS = [1, 3, 4]
NUM_LAYERS = 3
# DFlash 2: rows that a convolution reads, channels that share a correction, and its selector.
DFLASH2 = {"conv_kernel_size": 4, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8}
# LiLiCorr: its convolutions, and a small transformer over all candidates of a block.
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
# Each config's fields, and the width of its MLPs, which makes all drafters equally large.
ARCHITECTURES: dict[str, tuple[str, dict, int]] = {
    "dflash": ("DFlashDraftModel", {}, 768),
    "dflash2": ("DFlash2DraftModel", DFLASH2, 624),
    "lilicorr": ("LiLiCorrDraftModel", LILICORR, 624),
}


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

    With `steps`, train for that many steps instead, however busy the cores are. With `start`, begin
    with the layers of the drafter in that folder.
    """
    pairs = [pair for pair in pairs if len(pair[1]) > BLOCK_SIZE]
    target = Qwen3ForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16).eval()
    config = drafter_config(target, mask_token_id, architecture)
    torch.manual_seed(0)
    drafter = ReferenceDrafter(parse_config(str(out), config))
    if start is not None:
        known = drafter.state_dict()
        layers = load_file(start / "model.safetensors")
        drafter.load_state_dict({k: v for k, v in layers.items() if k in known}, strict=False)
    head = target.get_output_embeddings().weight.detach()
    trainer = Trainer(
        drafter, target.get_input_embeddings(), head, muon_and_adamw(drafter), peak=3e-3
    )
    source = Live(target, TAPS, pairs)
    task = progress.add_task("drafter", total=1.0)

    def done() -> float:
        return trainer.step / steps if steps else trainer.seconds / (minutes * 60)

    while (share := done()) < 1:
        trainer.advance(source, cosine(share))
        if trainer.step % 10 == 0:
            about = f"drafter: step {trainer.step}, acceptance length {trainer.length:.2f}"
            progress.update(task, completed=share, description=about)
            if trainer.step % 200 == 0:
                progress.console.print(f"{about} in training")
    progress.console.print(f"drafter: {trainer.step} steps, {trainer.length:.2f} tokens a step")
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in drafter.named_parameters()
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
