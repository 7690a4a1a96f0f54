"""Our lines in vLLM's log: at start-up, at intervals, and warnings of silent failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from logging import Logger

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dflash import __version__
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS, EngineOptions
from vllm_dflash.engine.reporting.statistics import DraftStatistics, Increases
from vllm_dflash.planning.costs import Curve, StepCosts
from vllm_dflash.vllms_own import SWITCH_OFF

ENOUGH_VERIFICATIONS, ENOUGH_STEPS = 256, 32
"""Minimum between two checks of acceptance. Steps count because requests with the same prompt are
all rejected at the same place, in the same step."""
LEAST_ACCEPTED = 0.1
"""Accepted drafts per verification below which acceptance counts as chance: a drafter with random
weights sometimes hits a token, and one whose drafts are one position late finds repeated ones."""
STEPS_FOR_A_LINE = 32
"""Minimum steps in which drafts could have been used, for another line about them."""


def logger() -> Logger:
    """Our logger, a child of vLLM's, so that vLLM's log settings apply."""
    return init_logger("vllm.dflash")


def log_active(options: EngineOptions) -> None:
    """Log which DFlash runs, in one line."""
    drafter, width, most = options.drafter, options.draft_width, options.num_speculative_tokens
    longer = "a draft tree" if options.tree_nodes == most else "free drafts"
    logger().info(
        "vllm-dflash %s is active: drafter %s, draft length %s (%s%d tokens a step%s), runner %s,"
        " block size %d, taps: outputs of layers %s, counted from 0 (vLLM's auxiliary layers %s)",
        __version__,
        drafter.model,
        options.draft_length,
        "up to " if options.is_planned else "",
        width,
        f"; with {longer} {most}, vLLM's num_spec_tokens" if most > width else "",
        options.runner,
        drafter.block_size,
        list(drafter.taps),
        tuple(tap + 1 for tap in drafter.taps),
    )


def log_gpu_figures() -> None:
    """Log, on a GPU, how fast this package was on the one that has run it. To go when `make gpu`
    has shown that it is at least as fast as vLLM's own DFlash at all numbers of requests."""
    if current_platform.is_cuda():
        logger().info(
            "on the one GPU that has run vllm-dflash, an H200, it made 0.87 to 1.31 of the tokens/s"
            " of vLLM's own DFlash with its best K (docs/benchmarks.md). %s.",
            SWITCH_OFF,
        )


def log_lengths(lengths: Sequence[int], ragged_seconds: float) -> None:
    """Log how draft lengths vary on V2.

    Args:
        lengths: those that all requests of a step can share.
        ragged_seconds: extra time of a step whose requests have different lengths.
    """
    logger().info(
        "draft lengths %s (the same for all requests of a step, or each its own, for %.2f ms more)",
        ", ".join(map(str, lengths)),
        1000 * ragged_seconds,
    )


def log_free_drafts(options: EngineOptions) -> None:
    """Log that free drafts are on."""
    is_short = options.runner == "v1" and options.most_free < MOST_FREE_DRAFTS
    logger().info(
        "free drafts: up to %d tokens of a request's own text, where it repeats itself%s",
        options.most_free,
        f". Up to {MOST_FREE_DRAFTS} without num_speculative_tokens, LoRA, linear attention, a"
        " scheduler of your own, or a small max_num_batched_tokens"
        if is_short
        else "",
    )


def log_costs(costs: StepCosts, seconds: float) -> None:
    """Log the costs that the planner starts from, and how long measuring them took."""

    def milliseconds(curve: Curve) -> str:
        last = int(curve.counts[-1])
        return ", ".join(
            f"{1000 * float(curve.at(count)):.1f} ms for {count}"
            for count in sorted({min(count, last) for count in (1, 8, 64, last)})
        )

    logger().info(
        "draft lengths are planned from costs measured in %.1f s, by tokens: target %s; drafter %s",
        seconds,
        milliseconds(costs.verify),
        milliseconds(costs.draft),
    )


class PeriodicLog:
    """Logs what was planned since the last line. vLLM's own line says how many drafts were verified
    and accepted."""

    def __init__(self, statistics: DraftStatistics, interval: float) -> None:
        """Log at most one line per `interval` seconds."""
        self._statistics = statistics
        self._increases = Increases(statistics, interval)
        self._counted = 0
        """Steps up to the last line in which any request could have been drafted."""

    def tick(self) -> None:
        """Call after each step. Logs if a line is due.

        One that is due waits for enough steps, however long the engine is idle before them.
        """
        counted = self._statistics.drafted_steps + self._statistics.skipped_steps
        if counted - self._counted < STEPS_FOR_A_LINE:
            return
        fresh = self._increases.tick()
        if fresh is None:
            return
        self._counted, since = counted, Counter(fresh)
        able = since["drafted_steps"] + since["skipped_steps"]
        parts = [f"DFlash planner: Drafted steps: {100 * since['drafted_steps'] / able:.0f}%"]
        if drafts := since["draft_tokens"]:
            parts += [f"Free drafts: {100 * since['free_draft_tokens'] / drafts:.0f}%"]
        else:
            parts[0] += " (drafts do not pay at this load)"
        logger().info("%s", ", ".join(parts))


class DraftWatch:
    """Warns, once each, of failures without an error: drafts that are not finite, and drafts that
    are accepted by chance only."""

    def __init__(self, statistics: DraftStatistics, *, target: str, drafter: DrafterSpec) -> None:
        self._statistics, self._drafter = statistics, drafter
        self._pair = f"{drafter.model} --target {target}"
        self._warned_of_nan = self._warned_of_zero = False
        self._steps = self._verifications = self._accepted = 0

    def tick(self) -> None:
        """Call after each step. Compares the counters with those of the last check."""
        now = self._statistics
        if now.nan_drafts and not self._warned_of_nan:
            self._warned_of_nan = True
            logger().warning(
                "DFlash: the logits of %d drafts were not finite. They are dropped, so the output"
                " is right, but slower. Usual causes: damaged weights, or a dtype too narrow for"
                " them (float16). To find the first stage that fails, in a clone of vllm-dflash:"
                " python benchmarks/parity %s",
                now.nan_drafts,
                self._pair,
            )
        self._steps += 1
        # Free drafts say nothing about the drafter.
        all_verifications = now.verifications - now.free_verifications
        verifications = all_verifications - self._verifications
        is_enough = verifications >= ENOUGH_VERIFICATIONS and self._steps >= ENOUGH_STEPS
        if not is_enough or self._warned_of_zero:
            return
        all_accepted = now.accepted_tokens - now.free_accepted_tokens
        accepted = all_accepted - self._accepted
        self._steps = 0
        self._verifications, self._accepted = all_verifications, all_accepted
        if accepted < LEAST_ACCEPTED * verifications:
            self._warned_of_zero = True
            logger().warning(
                "DFlash: of the drafts of the last %d verifications %d were accepted. The output"
                " is right, but drafting is of no use. Usual causes: a drafter trained for another"
                " target, or for another version of it; a chat template or thinking mode it was"
                " not trained on; taps, scaling or rotation that its config states wrongly%s."
                " To compare its config with the target's: vllm-dflash inspect %s",
                verifications,
                accepted,
                _other_first_row(self._drafter),
                self._pair,
            )


def _other_first_row(drafter: DrafterSpec) -> str:
    """How to read a drafter whose config is wrong about the row that predicts the first draft."""
    if drafter.lilicorr is not None:  # it can have only one
        return ""
    said, other = ("true", "false") if drafter.sample_from_anchor else ("false", "true")
    return (
        f", or sample_from_anchor, which is {said} by it (try --speculative-config"
        ' \'{"drafter_overrides": {"dflash_config": {"sample_from_anchor":'
        f" {other}}}}}, ...}}')"
    )
