"""`vllm-dflash inspect`: what a drafter is, whether it fits, and what it costs in memory."""
