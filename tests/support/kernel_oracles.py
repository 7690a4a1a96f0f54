"""All our Triton kernels: a test checks that none is missing here."""

from support.decided_steps import DECISIONS
from support.drawn_drafts import DRAWN_DRAFTS
from support.drawn_tokens import DRAWING
from support.grown_trees import TREES
from support.judged_logits import CONFIDENCE
from support.kernel_oracle import Oracle
from support.moved_nodes import TREE_MOVE
from support.searched_texts import TEXT_LOOK_UP
from support.tree_rows import TREE_ATTENTION

ORACLES: tuple[Oracle, ...] = (
    *(CONFIDENCE, TEXT_LOOK_UP, DECISIONS, DRAWING, DRAWN_DRAFTS),
    *(TREES, TREE_ATTENTION, TREE_MOVE),
)
