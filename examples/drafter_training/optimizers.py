"""Muon and AdamW combined: the optimizers, their learning rate over a run, and their steps."""

import math
from collections.abc import Iterable

import torch


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW alone, for machines where bf16 is slow: Muon computes in bf16."""
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)


def muon_and_adamw(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms: learns about twice as fast."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        is_table = any(table in name for table in ("embed", "lm_head", "codebook"))
        is_matrix = parameter.ndim == 2 and not is_table
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(others)]


def cosine(fraction: float) -> float:
    """Warm up over 2% of the run, then follow a cosine to zero. Returns a factor in [0, 1]."""
    return min(1.0, fraction / 0.02) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def step_all(optimizers: list[torch.optim.Optimizer], module: torch.nn.Module, lr: float) -> None:
    """Clip, set the learning rate, step and zero."""
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
