"""Where vLLM keeps the arguments of `vllm serve`, which depends on its version."""

from __future__ import annotations

try:
    from vllm.entrypoints.common import cli_args  # from vLLM 0.33 on
except ImportError:
    from vllm.entrypoints.launchers import cli_args

make_arg_parser = cli_args.make_arg_parser
validate_parsed_serve_args = cli_args.validate_parsed_serve_args
