"""A session's next turn continues behind its stop token, and a turn that has ended gets drafts.

Delete the first method when 0.32 is dropped, and the second when `update_draft_token_ids` leaves
out requests that are not running (docs/engineering/upstream.md#stopped_sessionspy).
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus


class SessionScheduler(Scheduler):
    """vLLM's scheduler, fixed for sessions whose turns end within a draft."""

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.resumable:
            computed = request.num_computed_tokens - request.num_output_placeholders
            # The last token of a turn is never computed: the next turn takes its place.
            request.num_computed_tokens -= max(0, computed - (request.num_tokens - 1))
        return super()._handle_stopped_request(request)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Give requests their drafts, except turns that have ended."""
        super().update_draft_token_ids(draft_token_ids)
        for name in draft_token_ids.req_ids:
            request = self.requests.get(name)
            if request is not None and request.status != RequestStatus.RUNNING:
                request.spec_token_ids = []
