"""Cut blocks from the target's own text: what a drafter sees, and what it has to predict.

R sequences of at most T tokens, A blocks of B rows cut from each; m taps, hidden size H.
"""

import random
from dataclasses import dataclass, replace

import torch

from drafter_training.continuations import Pair


@dataclass(frozen=True)
class Blocks:
    """Blocks of R sequences. Row 0 of a block is its anchor token, the other rows are masks."""

    ids: torch.Tensor
    """Tokens of the sequences, [R, T]."""
    positions: torch.Tensor
    """Positions of the rows, [R, A * B]."""
    tokens: torch.Tensor
    """Tokens of the rows, as the drafter gets them, [R, A * B]."""
    labels: torch.Tensor
    """Tokens to predict in each row, -100 where there is nothing to predict, [R, A * B]."""
    size: int
    """Rows of a block, B."""

    def on(self, device: torch.device) -> "Blocks":
        """Return a copy on that device."""
        names = ("ids", "positions", "tokens", "labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def with_context(self) -> torch.Tensor:
        """Return positions of the sequences, then of the rows: [R, T + A * B]."""
        everywhere = self._places(self.ids).expand(len(self.ids), -1)
        return torch.cat([everywhere, self.positions], dim=1)

    def visible(self) -> torch.Tensor:
        """Mask: a block sees itself and the context before its anchor, [R, 1, A * B, T + A * B]."""
        anchors = self.positions[:, :: self.size].repeat_interleave(self.size, dim=1)  # [R, A * B]
        context = self._places(self.ids) < anchors[:, :, None]
        number = self._places(self.positions) // self.size
        block = (number[:, None] == number).expand(len(self.positions), -1, -1)
        return torch.cat([context, block], dim=2)[:, None]

    def before(self) -> torch.Tensor:
        """Return the target's token before each row, [R, A * B]."""
        return self.ids.gather(1, (self.positions - 1).clamp(max=self.ids.shape[1] - 1))

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Return 0, 1, ... along rows [R, N]: [N]."""
        return torch.arange(rows.shape[1], device=rows.device)


def random_anchors(pair: Pair, rng: random.Random, count: int) -> list[int]:
    """Choose `count` places of a continuation at which blocks start, ascending."""
    prompt, continuation = pair
    places = range(len(prompt), len(prompt) + len(continuation) - 1)
    return sorted(rng.choices(places, k=count))


def cut_blocks(
    pairs: list[Pair], anchors: list[list[int]], size: int, mask_token_id: int
) -> Blocks:
    """Pad sequences and cut blocks of `size` rows at the anchors, as many from each sequence."""
    sequences = [prompt + continuation for prompt, continuation in pairs]
    length = max(map(len, sequences))
    ids = torch.tensor([one + [0] * (length - len(one)) for one in sequences])
    ends = torch.tensor([[len(one)] for one in sequences])
    positions = (torch.tensor(anchors)[:, :, None] + torch.arange(size)).flatten(1)  # [R, A * B]
    tokens = ids.gather(1, positions.clamp(max=length - 1))
    is_anchor = (torch.arange(positions.shape[1]) % size) == 0
    labels = tokens.masked_fill(is_anchor | (positions >= ends), -100)
    return Blocks(ids, positions, tokens.masked_fill(~is_anchor, mask_token_id), labels, size)
