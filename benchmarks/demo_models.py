"""The demo pair of this repository, which benchmarks run unless they are told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "models" / "demo"
DFLASH: dict[str, Any] = {"method": "dflash", "model": str(DEMO / "drafter")}
"""Its speculative config."""
HELD_OUT = DEMO / "held_out.jsonl"
"""Prompts that it was not trained on."""
