"""What vLLM's log says of us: our refusals once more, and warnings of vLLM's that are no news."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NO_NEWS = {
    "vllm.config.vllm": "max_num_scheduled_tokens is set to",
    "vllm.v1.core.sched.scheduler": "EAGLE trailing prefix-cache block dropping is disabled.",
}
"""Loggers of vLLM's, and how the one warning of each begins that does not hold for DFlash.

The first comes with every drafter where `max_num_batched_tokens` is below 8192, and calls it a
consequence of drafting: nothing was taken off it. The second is of EAGLE, whose drafter's cache is
shifted by one token; ours is not, so keeping the last block of a prefix costs no acceptance. vLLM
0.33 knows that, and does not say it.
"""


class DropsOneWarning(logging.Filter):
    """Lets all records of a logger pass but the first that begins so; then it is gone."""

    def __init__(self, logger: logging.Logger, beginning: str) -> None:
        super().__init__()
        self._logger, self._beginning = logger, beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it passes."""
        if not record.getMessage().startswith(self._beginning):
            return True
        self._logger.removeFilter(self)
        return False


def filter_vllms_warnings() -> None:
    """Keep each warning that is no news out of this process's log, once."""
    for name, beginning in NO_NEWS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, DropsOneWarning) for one in logger.filters):
            logger.addFilter(DropsOneWarning(logger, beginning))


@contextmanager
def refusals_logged(*kinds: type[Exception]) -> Iterator[None]:
    """Say at ERROR why an engine does not start, before vLLM's traceback buries the sentence."""
    try:
        yield
    except kinds as error:
        from vllm.logger import init_logger

        init_logger("vllm.dflash").error("%s", error)
        raise
