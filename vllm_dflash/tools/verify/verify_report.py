"""A verification in words."""

from __future__ import annotations

from vllm_dflash.tools.tables import Table
from vllm_dflash.tools.verify.verification import Level, Verification

VERDICTS = {
    "lossless": "lossless: DFlash writes what plain decoding writes",
    "regression": "REGRESSION: DFlash writes what plain decoding would not",
    "nothing drafted": "nothing verified: no draft reached the target at any concurrency",
}
WITH_TIES = (
    "lossless but for rounding: where DFlash's texts part from plain decoding's, that likes both"
    " tokens as well, to within {:g} nat"
)
FIX_LENGTHS = 'add "draft_length": "fixed" to the speculative config to have drafts in every step.'


def make_table(result: Verification) -> Table:
    """A row per concurrency."""
    about = result.about
    title = (
        f"{about['prompts']} prompts, up to {about['tokens']} tokens, {about['dtype']},"
        f" drafted by {about['drafter']}; a tie is up to {result.tie:g} nat"
    )
    # Of texts, then of places where they part, then of drafts. In a terminal of 100 columns.
    columns = ["concurrency", "identical", "tied", "regressed", "ties", "regressions", "regret"]
    columns += ["drafts", "acceptance"]
    return Table(title, columns, [_row(level) for level in result.levels])


def make_notes(result: Verification) -> list[str]:
    """The worst divergence of each concurrency, what was not tested, and the verdict."""
    notes = [
        f"worst at concurrency {level.concurrency}: {level.worst}"
        for level in result.levels
        if level.worst is not None
    ]
    notes += [
        f"no draft was verified at concurrency {level.concurrency}, so nothing was tested there: "
        + FIX_LENGTHS
        for level in result.levels
        if not level.drafts_verified
    ]
    has_ties = any(level.ties for level in result.levels)
    if result.verdict == "lossless" and has_ties:
        return [*notes, WITH_TIES.format(result.tie)]
    return [*notes, VERDICTS[result.verdict]]


def _row(level: Level) -> list[str]:
    worst, length = level.worst, level.acceptance_length
    return [
        str(level.concurrency),
        str(level.identical),
        str(level.with_ties),
        str(level.with_regressions),
        str(level.ties),
        str(level.regressions),
        "-" if worst is None else f"{worst.regret:.3g}",
        str(level.drafts_verified),
        "-" if length is None else f"{length:.2f}",
    ]
