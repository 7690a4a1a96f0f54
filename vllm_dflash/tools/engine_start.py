"""The one way in which the commands start an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.engine_answers import EngineAnswers

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def start(
    model: str,
    speculative_config: dict[str, Any] | None = None,
    flags: list[str] | None = None,
    **arguments: Any,
) -> EngineAnswers:
    """An engine of a target in this process; `arguments` are more of vLLM's engine arguments.

    With `flags` of `vllm serve`, be they none, the engine is a server's, whose batches are of other
    sizes than those of `LLM`, and it has statistics; flags of the server itself mean nothing.

    Raises:
        SystemExit: a flag is unknown.
    """
    arguments |= {"model": model, "speculative_config": speculative_config}
    if flags is None:
        from vllm import LLM

        return EngineAnswers(LLM(**arguments).llm_engine)
    return EngineAnswers(_start_server(flags, arguments))


def _start_server(flags: list[str], arguments: dict[str, Any]) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_dflash.config.serve_arguments import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parsed = parser.parse_args(flags)
    speculative = (parsed.speculative_config, parsed.spec_method, parsed.spec_model)
    other_target = parsed.model_tag not in (None, arguments["model"])
    if other_target or any(one is not None for one in speculative):
        parser.error("the target and the speculative config are not among the flags after --")
    engine = EngineArgs.from_cli_args(parsed)
    for name, value in {"disable_log_stats": False, **arguments}.items():
        setattr(engine, name, value)
    return LLMEngine.from_engine_args(engine, UsageContext.OPENAI_API_SERVER)
