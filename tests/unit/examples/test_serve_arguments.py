"""The arguments of `vllm serve`, wherever this vLLM keeps them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from ray_engines import serve_arguments


def test_of_this_vllm() -> None:
    assert serve_arguments.make_arg_parser.__module__.endswith(".cli_args")
    assert serve_arguments.validate_parsed_serve_args.__module__.endswith(".cli_args")


def test_where_vllm_0_33_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("vllm.entrypoints.common")
    package.cli_args = ModuleType("cli_args")
    package.cli_args.make_arg_parser = package.cli_args.validate_parsed_serve_args = print
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.common", package)
    try:
        assert importlib.reload(serve_arguments).make_arg_parser is print
    finally:
        monkeypatch.undo()
        importlib.reload(serve_arguments)
