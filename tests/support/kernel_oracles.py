"""All Triton kernels of ours: one that is not listed here is not tried on GPUs."""

from support.decided_steps import DECISIONS
from support.judged_logits import CONFIDENCE
from support.kernel_oracle import Oracle
from support.searched_texts import TEXT_LOOK_UP

ORACLES: tuple[Oracle, ...] = (CONFIDENCE, TEXT_LOOK_UP, DECISIONS)
