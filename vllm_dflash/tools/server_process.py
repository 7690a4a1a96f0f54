"""The process of a `Server`: `vllm serve` that reports facts and ends with the command.

python -m vllm_dflash.tools.server_process serve MODEL FLAGS
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from vllm_dflash import __version__

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PARENT = "DFLASH_PARENT"
"""Variable with the id of the process that this one ends with."""
FACTS_PATH = "/vllm_dflash/facts"
SECONDS_TO_STOP = 10.0
"""For a server that is to end; then it is killed."""
REFUSED = 64
"""Exit code of a server that refuses its arguments. The log ends with `REFUSAL` and the reason."""
REFUSAL = "refused: "


class Facts(TypedDict):
    """Facts about an engine."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_new_tokens: int | None
    """Most tokens of an answer, whatever a request asks for; None without such a limit."""
    cache_tokens: int
    """Tokens that the KV cache holds, if all layers are of one kind."""
    stop_tokens: list[int]
    """Tokens that end a text."""
    has_chat_template: bool
    drafter: str | None
    """The package that drafts, and its version; None without speculative decoding."""
    versions: dict[str, str]


class FactsMiddleware:
    """Answers at `FACTS_PATH`. vLLM tells these only with all of its endpoints for developers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for facts, and pass on every other."""
        if scope.get("path") != FACTS_PATH:
            await self._app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        await JSONResponse(facts_about(scope["app"].state.engine_client))(scope, receive, send)


def facts_about(engine: Any) -> Facts:
    """Return facts about an engine: vLLM's `AsyncLLM` or `LLMEngine`."""
    import torch
    import vllm
    from vllm import SamplingParams

    config, processor = engine.vllm_config, engine.input_processor
    params = SamplingParams()
    params.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    model = config.model_config
    # As vLLM's endpoints limit answers.
    most_new = model.override_generation_config.get("max_new_tokens")
    if model.generation_config not in ("auto", "vllm"):
        most_new = model.get_diff_sampling_param().get("max_tokens")
    drafter = None
    if config.speculative_config is not None:
        ours = config.parallel_config.worker_cls.startswith("vllm_dflash.")
        drafter = f"vllm-dflash {__version__}" if ours else f"vLLM {vllm.__version__}"
    return Facts(
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_new_tokens=most_new,
        cache_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        stop_tokens=sorted(params.all_stop_token_ids),
        has_chat_template=bool(getattr(processor.tokenizer, "chat_template", None)),
        drafter=drafter,
        versions={
            "vllm-dflash": __version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
    )


def run(main: Callable[[], None]) -> None:
    """Run `vllm serve`: end with the parent, and report what it refuses."""
    # The parent may have ended while vLLM was imported.
    parent = int(os.environ.get(PARENT, os.getppid()))
    threading.Thread(target=_end_without, args=[parent], daemon=True).start()
    sys.argv[0] = "vllm"
    try:
        main()
    except ValueError as error:
        traceback.print_exc()
        # Not by `print`, which vLLM lets begin every line with the name of the process.
        os.write(sys.stderr.fileno(), f"\n{REFUSAL}{error}\n".encode())
        sys.exit(REFUSED)


def _end_without(parent: int) -> None:
    """End all processes of this group with the parent, so that they do not keep their memory."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_STOP)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    run(main)
