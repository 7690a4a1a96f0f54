"""What a worker says in vLLM's log when it starts."""

from __future__ import annotations

from logging import Logger

from vllm.logger import init_logger

from vllm_dflash import __version__
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.planning.costs import Curve, StepCosts


def logger() -> Logger:
    """Ours, under vLLM's, so that its settings apply."""
    return init_logger("vllm.dflash")


def log_active(options: DFlashOptions) -> None:
    """The one line that says which DFlash runs."""
    drafter = options.drafter
    logger().info(
        "vllm-dflash %s is active: drafter %s, draft length %s (%s%d tokens a step), runner %s,"
        " block size %d, taps %s",
        __version__,
        drafter.model,
        options.draft_length,
        "up to " if options.is_planned else "",
        options.draft_width,
        options.runner,
        drafter.block_size,
        list(drafter.taps),
    )


def log_free_drafts(most: int, *, shares_outputs: bool) -> None:
    """The line that says that texts are looked up."""
    logger().info(
        "free drafts: up to %d tokens of a request's own text, where it repeats itself%s",
        most,
        ", and of what others were answered lately" if shares_outputs else "",
    )


def log_costs(costs: StepCosts, origin: str) -> None:
    """The line that says what the planner starts from, and where that is from."""

    def milliseconds(curve: Curve) -> str:
        last = int(curve.counts[-1])
        return ", ".join(
            f"{1000 * float(curve.at(count)):.1f} ms for {count}"
            for count in sorted({min(count, last) for count in (1, 8, 64, last)})
        )

    logger().info(
        "draft lengths are planned from costs %s, by tokens: target %s; drafter %s",
        origin,
        milliseconds(costs.verify),
        milliseconds(costs.draft),
    )
