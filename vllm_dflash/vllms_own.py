"""How to switch to vLLM's own DFlash, for every message that recommends it."""

OWN_KEYS = (
    *("draft_length", "draft_tree", "draft_window", "drafter_overrides"),
    *("free_drafts", "require"),
)
"""Our options in the speculative config, which are removed before vLLM reads it."""

SWITCH_OFF = (
    "To run vLLM's own DFlash, set VLLM_PLUGINS='', add \"num_speculative_tokens\" to the"
    " speculative config, because vLLM needs it, and remove"
    f" {', '.join(map(repr, OWN_KEYS[:-1]))} and {OWN_KEYS[-1]!r},"
    " which only vllm-dflash knows"
)
"""A sentence without the full stop."""
