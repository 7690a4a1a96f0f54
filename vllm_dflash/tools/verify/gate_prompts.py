"""What is continued where nobody says."""

from __future__ import annotations

from pathlib import Path

from vllm_dflash.tools.prompts import read_prompts

BUILT_IN = [
    "def quicksort(items):\n",
    'class LruCache:\n    """A cache that forgets what was not used for the longest time."""\n\n',
    "SELECT customer.name, SUM(invoice.total)\nFROM customer\n",
    '{"name": "Ada Lovelace", "born": 1815, "known for": [',
    "#!/usr/bin/env bash\n# Back up a folder, keep the last seven copies.\nset -euo pipefail\n",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does it take?\nAnswer:",
    "The first ten prime numbers are 2, 3, 5,",
    "Translate to French.\nEnglish: Where is the railway station?\nFrench:",
    "User: Explain in three sentences why the sky is blue.\nAssistant:",
    "User: Write a short poem about the sea.\nAssistant:",
    "User: Summarise: The meeting was moved from Monday to Thursday, because two of the five"
    " members are travelling, and the room is free then.\nAssistant:",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Ingredients for pancakes:\n- 250 g flour\n-",
    "The history of the bicycle begins in",
    "Die Katze saß am Fenster und",
]


def default_prompts(target: str) -> list[str]:
    """Some of many kinds, after the held-out ones that lie beside the demo pair's target."""
    held_out = Path(target).parent / "held_out.jsonl"
    return [*(read_prompts(held_out) if held_out.is_file() else []), *BUILT_IN]
