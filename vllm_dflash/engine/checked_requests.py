"""A request whose options of ours are wrong is refused, and does not run without them.

Runs in the front end. vLLM hands `extra_args` on as they are, so only a plugin can check its own.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY
from vllm_dflash.config.request_options import KEY, request_options


def check_requests() -> None:
    """Check the options of each request for our engines. Idempotent.

    A request with a wrong one raises `VLLMValidationError`, which says what is allowed; a server
    answers with HTTP 400.
    """
    process_inputs = InputProcessor.process_inputs
    if hasattr(process_inputs, "wrapped_by_vllm_dflash"):
        return

    @wraps(process_inputs)
    def process_checked(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = process_inputs(self, *args, **kwargs)
        additional = self.vllm_config.additional_config
        is_ours = isinstance(additional, dict) and ADDITIONAL_CONFIG_KEY in additional
        given = getattr(request.sampling_params, "extra_args", None)  # None: a pooling model's
        if is_ours and given:
            try:
                request_options(given)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter=KEY) from None
        return request

    process_checked.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_checked
