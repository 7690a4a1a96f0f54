"""vLLM's schedulers, which count and send what is shown at `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dflash.engine.reporting.figures import INTERVAL, Figures, Increases, send_figures
from vllm_dflash.engine.reporting.statistics import METRICS, DraftStatistics


class CountingScheduler(Scheduler):
    """In the engine's process, on both runners."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics = DraftStatistics(self.num_spec_tokens)
        self._figures = Increases(self.statistics, INTERVAL, METRICS)
        self.free_drafts: Mapping[str, int] = {}
        """That the step whose output is taken has verified, of requests that had any."""

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """vLLM counts the drafts of a request, and we the free ones among them: not those of one
        that was aborted meanwhile, so that no more free drafts are accepted than drafts."""
        if verified := self.free_drafts.get(request_id, 0):
            self.statistics.free_draft_tokens += verified
            self.statistics.free_accepted_tokens += num_accepted_tokens
        counts = num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens
        return super().make_spec_decoding_stats(spec_decoding_stats, *counts, request_id)

    def send(
        self, outputs: Mapping[int, EngineCoreOutputs], of_worker: Figures | None, *, is_busy: bool
    ) -> None:
        """A step's output is taken: what is new goes with it to the API server, if it is time to,
        or all of it if the engine runs dry."""
        own = self._figures.tick() if is_busy else self._figures.take()
        if figures := (own or {}) | (of_worker or {}):
            send_figures(outputs, figures)
