"""`vllm-dflash bench --simulate-costs`: what the planner would choose on another machine."""
