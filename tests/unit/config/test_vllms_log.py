"""What of vLLM's log is quietened, and that nothing else is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import vllm.logger
from vllm.engine.arg_utils import EngineArgs

from support.log_lines import log_lines
from support.pairs import make_pair
from vllm_dflash.config.vllms_log import NO_NEWS, filter_vllms_warnings, refusals_logged

FRONT_END = "vllm.config.vllm"


@contextmanager
def what_passes(name: str) -> Iterator[list[str]]:
    """Messages that a logger hands on, without filters to begin with; those are put back.

    Taken behind the filters, where it hands on: vLLM configures logging while it makes an engine's
    config, which takes a handler of ours away.
    """
    logger, lines = logging.getLogger(name), []
    filters = [*logger.filters]
    logger.filters.clear()
    try:
        with patch.object(logger, "callHandlers", lambda one: lines.append(one.getMessage())):
            yield lines
    finally:
        logger.filters[:] = filters


@pytest.mark.parametrize("name", NO_NEWS)
def test_one_warning_is_filtered_once(name: str) -> None:
    logger = logging.getLogger(name)
    with what_passes(name) as lines:
        filter_vllms_warnings()
        filter_vllms_warnings()
        logger.warning("Another of %s", name)
        logger.warning("%s 4096 and so on", NO_NEWS[name])
        logger.warning("%s 4096 and so on", NO_NEWS[name])  # of another engine, say
    assert lines == [f"Another of {name}", f"{NO_NEWS[name]} 4096 and so on"]


@pytest.mark.parametrize("name", NO_NEWS)
def test_this_vllm_warns_so(name: str) -> None:
    assert f'"{NO_NEWS[name]}' in Path(str(import_module(name).__file__)).read_text()


@pytest.mark.parametrize(("method", "warned"), [("dflash", False), ("ngram", True)])
def test_only_engines_of_ours_are_quieter(tmp_path: Path, method: str, warned: bool) -> None:
    pair = make_pair(tmp_path)
    asked = {
        "dflash": {"method": "dflash", "model": str(pair.drafter)},
        "ngram": {"method": "ngram", "num_speculative_tokens": 2},
    }[method]
    args = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        max_num_batched_tokens=512,
        speculative_config=asked,
    )
    vllm.logger._print_warning_once.cache_clear()
    with what_passes(FRONT_END) as lines:
        args.create_engine_config()
    assert any(line.startswith(NO_NEWS[FRONT_END]) for line in lines) is warned


def test_refusals_are_logged_and_raised() -> None:
    with log_lines() as lines:
        with pytest.raises(ValueError, match="100% wrong"), refusals_logged(ValueError):
            raise ValueError("100% wrong")
        with pytest.raises(KeyError), refusals_logged(ValueError):
            raise KeyError("not a refusal")
    assert lines == ["ERROR 100% wrong"]
