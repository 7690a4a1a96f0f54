"""What to write for vLLM's own DFlash, in every message that recommends it."""

OWN_KEYS = (
    *("draft_length", "draft_tree", "drafter_overrides", "estimates_folder", "free_drafts"),
    "require",
)
"""Options of ours in the speculative config, which vLLM does not know and must not see."""

SWITCH_OFF = (
    "For vLLM's own DFlash set VLLM_PLUGINS='', add \"num_speculative_tokens\" to the speculative"
    f" config, which vLLM needs, and take out {', '.join(map(repr, OWN_KEYS[:-1]))} and"
    f" {OWN_KEYS[-1]!r},"
    " which only vllm-dflash knows"
)
"""A sentence without its full stop."""
