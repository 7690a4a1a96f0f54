"""The `vllm-dflash` command. Nothing else imports it."""
