"""Warnings of what goes on without an error: drafts that are not finite, or never accepted."""

from __future__ import annotations

from collections.abc import Callable

from vllm_dflash.engine.reporting.statistics import DraftStatistics

FIRST_LOOK, LONGEST_INTERVAL = 32, 1024
"""Steps. Counters may lie on a device and have to be fetched; so intervals double."""
ENOUGH_VERIFICATIONS = 256
LEAST_ACCEPTED = 0.01
"""Accepted drafts per verification, below which acceptance counts as stuck at zero: a drafter of
random weights hits a token now and then."""


class DraftWatch:
    """Warns once of each."""

    def __init__(
        self,
        collect: Callable[[], DraftStatistics],
        warn: Callable[..., None],
        *,
        target: str,
        drafter: str,
    ) -> None:
        """Look at what `collect` returns; `warn` is a logger's `warning`."""
        self._collect = collect
        self._warn = warn
        self._parity = f"vllm-dflash parity {drafter} --target {target}"
        self._interval = self._steps_left = FIRST_LOOK
        self._warned_of_nan = False
        self._warned_of_zero = False
        self._verifications = self._accepted = 0

    def tick(self) -> None:
        """A step has ended."""
        self._steps_left -= 1
        if self._steps_left == 1:
            self._collect()  # what is fetched from a device is there by the next step
        if self._steps_left or (self._warned_of_nan and self._warned_of_zero):
            return
        self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._steps_left = self._interval
        self.look()

    def look(self) -> None:
        """Compare the counters with those of the last looks."""
        statistics = self._collect()
        if statistics.nan_drafts and not self._warned_of_nan:
            self._warned_of_nan = True
            self._warn(
                "DFlash: the logits of %d drafts were not finite. Such drafts are thrown away and"
                " the requests go on undrafted, so the output is the target's, but slower. Usual"
                " causes: damaged weights, or a dtype too narrow for them (float16). Where it"
                " begins: %s",
                statistics.nan_drafts,
                self._parity,
            )
        # Free drafts say nothing about the drafter.
        all_verifications = statistics.verifications - statistics.free_verifications
        all_accepted = statistics.accepted_tokens - statistics.free_accepted_tokens
        verifications = all_verifications - self._verifications
        if verifications < ENOUGH_VERIFICATIONS:
            return
        accepted = all_accepted - self._accepted
        self._verifications, self._accepted = all_verifications, all_accepted
        if accepted < LEAST_ACCEPTED * verifications and not self._warned_of_zero:
            self._warned_of_zero = True
            self._warn(
                "DFlash: of the drafts of the last %d verifications %d were accepted. The output"
                " is right, but drafting is of no use. Usual causes: a drafter trained for another"
                " target, or for another version of it; a chat template or thinking mode it was"
                " not trained on; taps, scaling or rotation that its config states wrongly."
                " Whether it computes what it should: %s",
                verifications,
                accepted,
                self._parity,
            )
