"""A seeded request with a chunked prompt does not end a CPU engine.

Wrong in vLLM 0.32.0, V1 runner on CPU, plain decoding included: rows whose token is discarded (all
chunks of a prompt except the last) draw from the request's generator, which vLLM then sets back by
an offset. CPU generators have no offset, so this raises. Not reported yet
(docs/engineering/upstream.md). Delete this file when `_bookkeeping_sync` no longer calls
`set_offset` on CPU generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@contextmanager
def seeds_kept(runner: GPUModelRunner) -> Iterator[None]:
    """Remove the generators of rows whose token is discarded, while a step is sampled."""
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    kept = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
    try:
        yield
    finally:
        generators.update(kept)
