"""Targets from packages that `train_drafter.py` trains drafters for, and how they differ."""

from dataclasses import dataclass
from pathlib import Path

from packaged_pairs.target_folder import GEMMA3_270M, SMOLLM2, Packaged


@dataclass(frozen=True)
class DrafterShape:
    """What differs between drafters of different targets. All else is as in the target."""

    target_name: str
    """The target's name on its hub, which the checkpoint names."""
    taps: tuple[int, ...]
    """The target's layers whose outputs the drafter reads, from 0."""
    like: tuple[int, ...]
    """The target's layers that the drafter's layers start as."""
    mask_token_id: int
    """A token that the target never writes."""
    vocabulary: int = 8192
    """Tokens that can be drafted."""
    block_size: int = 8


@dataclass(frozen=True)
class PackagedPair:
    """A target in packages of PyPI, its drafter, and the folder of both."""

    packaged: Packaged
    root: Path
    shape: DrafterShape

    @property
    def packages(self) -> Path:
        """The folder into which its packages are installed."""
        return self.root / "packages"

    @property
    def target(self) -> Path:
        """The folder of the target's weights and tokenizer."""
        return self.root / "target"


PACKAGED_PAIRS = {
    "smollm2": PackagedPair(
        SMOLLM2,
        Path("models/smollm2"),
        DrafterShape(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            taps=(1, 8, 15, 21, 27),
            like=(28, 29),
            mask_token_id=16,  # <empty_output>
        ),
    ),
    "gemma3-270m": PackagedPair(
        GEMMA3_270M,
        Path("models/gemma3-270m"),
        DrafterShape(
            "google/gemma-3-270m",
            taps=(1, 5, 9, 13, 16),
            # Of its layers without a window: all layers of a drafter have one rotary base, and
            # those with a window have another.
            like=(11, 17),
            mask_token_id=4,  # <mask>
        ),
    ),
}
