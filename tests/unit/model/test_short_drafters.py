"""A drafter trained for fewer positions than its target has, on either runner (vllm#57964).

vLLM 0.32's Model Runner V2 does not check how far the drafter goes: its own DFlash reads past the
end of the rotary table, in blocks and in the context. vLLM 0.33 extends the table, or lowers the
target's limit if a longer table would differ. Our table has a row for each of the target's
positions; beyond the drafter's limit, ours keeps drafting or stops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.cached_drafter import Harness, Row, check_logits, features_of
from support.drafter_harness import DrafterHarness
from support.engines import slow_on_v2
from support.pairs import make_pair
from support.reference_decoding import draft

pytestmark = pytest.mark.usefixtures("runner")
OWN, OF_TARGET = 64, 256


def tables(harness: Harness) -> list[torch.Tensor]:
    attentions = harness.proposer.model.context.attentions
    return [attention.rotary_emb.cos_sin_cache for attention in attentions]


LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": OWN // 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default"),
        pytest.param({"rope_parameters": LINEAR}, id="linear", marks=slow_on_v2),
        pytest.param({"rope_parameters": LLAMA3}, id="llama3", marks=slow_on_v2),
    ],
)
def test_hazard_57964_no_position_is_read_behind_the_rotary_table(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Blocks and context beyond the drafter's own limit are rotated as in the reference."""
    pair = make_pair(tmp_path, max_position_embeddings=OWN, **changes)
    harness = DrafterHarness(pair, max_model_len=OF_TARGET)
    assert all(len(table) >= OF_TARGET for table in tables(harness))
    # The second block ends at the target's last position.
    contexts = [features_of(pair, length, seed=length) for length in (OWN + 5, OF_TARGET - 9)]
    drafts = harness.step([Row(i, rows, bonus=7) for i, rows in enumerate(contexts)])
    target, reference = pair.load_target(), pair.load_drafter()
    expected = torch.cat([draft(target, reference, rows, 7, 7) for rows in contexts])
    check_logits(harness.logits, expected)
    assert drafts == expected.argmax(-1).view(2, 7).tolist()


@pytest.mark.parametrize(
    ("num_rows", "num_drafts"),
    # A draft must fit, with the bonus token before it and the token after it.
    [
        (OWN - 8, 6),
        (OWN - 2, 0),
        *(
            pytest.param(OWN + rows, drafts, marks=slow_on_v2)
            for rows, drafts in ((-9, 7), (-3, 1), (0, 0), (30, 0))
        ),
    ],
)
def test_requests_are_drafted_up_to_the_drafters_own_limit(
    tmp_path: Path, num_rows: int, num_drafts: int
) -> None:
    """Their positions do not go on with this rotation."""
    pair = make_pair(tmp_path, max_position_embeddings=OWN, rope_parameters=YARN)
    harness = DrafterHarness(pair, max_model_len=OF_TARGET)
    (drafts,) = harness.step([Row(0, features_of(pair, num_rows, seed=0), bonus=7)])
    assert len(drafts) == num_drafts


def test_hazard_57964_where_vllms_own_table_is_too_short(tmp_path: Path) -> None:
    """vLLM's YaRN table has the checkpoint's length, whatever is asked for."""
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
    rope["original_max_position_embeddings"] = 16
    pair = make_pair(tmp_path, rope_parameters=rope, max_position_embeddings=OWN)
    harness = DrafterHarness(pair, max_model_len=OF_TARGET)
    assert all(len(table) >= OF_TARGET > 2 * 16 for table in tables(harness))
    harness.step([Row(0, features_of(pair, OWN + 30, seed=0))])  # at all positions
