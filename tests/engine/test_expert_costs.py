"""Costs measured at a start on V2, of a target with experts: rows that count, varied tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.forward_context import get_forward_context

from support.engines import runner_of
from support.families import make_family
from vllm_dflash.engine.v2 import v2_profile

pytestmark = pytest.mark.v2
ROWS = [1, 12]


def test_experts_are_run_for_the_rows_that_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's dummy rows are padding, which its routers leave out, and all have the same token."""
    family = make_family(tmp_path, "qwen3-moe")
    monkeypatch.setattr(v2_profile, "profiled_rows", lambda *_: ROWS)
    seen: list[tuple[int, int]] = []

    def routed(_: Any, __: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output  # [N, experts]
        counts = logits[~get_forward_context().is_padding]
        seen.append((len(counts), len(counts.topk(2).indices.unique())))

    with family.drafting() as llm:
        runner = runner_of(llm)
        layers = runner.model.model.layers
        handle = layers[0].mlp.gate.register_forward_hook(routed)
        v2_profile.profile_v2(runner)
        handle.remove()
    assert {count for count, _ in seen} >= {*ROWS}
    assert all(experts > 2 for count, experts in seen if count == ROWS[-1])
