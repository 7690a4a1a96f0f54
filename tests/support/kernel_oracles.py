"""All Triton kernels of ours: one that is not listed here is not tried on GPUs."""

from support.decided_steps import DECISIONS
from support.judged_logits import CONFIDENCE
from support.kernel_oracle import Oracle
from support.moved_nodes import TREE_MOVE
from support.searched_texts import TEXT_LOOK_UP
from support.tree_rows import TREE_ATTENTION

ORACLES: tuple[Oracle, ...] = (CONFIDENCE, TEXT_LOOK_UP, DECISIONS, TREE_ATTENTION, TREE_MOVE)
