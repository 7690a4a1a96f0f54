"""Argument parser of `vllm serve`; its module depends on vLLM's version."""

from __future__ import annotations

try:
    from vllm.entrypoints.common import cli_args  # vLLM 0.33 and later
except ImportError:
    from vllm.entrypoints.launchers import cli_args

make_arg_parser = cli_args.make_arg_parser
validate_parsed_serve_args = cli_args.validate_parsed_serve_args
