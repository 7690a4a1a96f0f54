"""What a user runs beside an engine: the `vllm-dflash` command. Nothing else imports it."""
