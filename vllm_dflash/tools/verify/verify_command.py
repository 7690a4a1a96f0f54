"""`vllm-dflash verify`: its arguments, its two engines, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_dflash.config.speculative_settings import asks_for_dflash
from vllm_dflash.tools.arguments import (
    NUMBER,
    NUMBERS,
    add_command,
    add_prompts,
    json_object,
    not_negative,
)
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.default_dtype import with_dtype
from vllm_dflash.tools.progress import Progress, progress_on
from vllm_dflash.tools.prompts import default_prompts, read_prompts
from vllm_dflash.tools.server import Server, other_plugins, temporary_logs
from vllm_dflash.tools.tables import Table
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Verification

VERDICTS = {
    "lossless": "lossless: DFlash writes what plain decoding writes",
    "regression": "REGRESSION: DFlash writes what plain decoding would not",
    "nothing drafted": "nothing verified: no draft reached the target at any concurrency",
}
WITH_TIES = (
    "lossless but for rounding: where the texts differ, plain decoding finds both tokens equally"
    " likely, to within {:g} nat"
)


EPILOG = """Flags after -- are passed to both engines, as for `vllm serve`.

examples:
  vllm-dflash verify --target models/demo/target \\
      --speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'
  vllm-dflash verify --target Qwen/Qwen3-8B --prompts prompts.jsonl --out result.json \\
      --speculative-config '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}' \\
      -- --max-model-len 8192 --gpu-memory-utilization 0.8

exit code: 0 lossless, 1 regression, 2 could not run (or nothing was drafted),
130 or 143 interrupted"""
ABOUT = """Generate the same texts with DFlash and with plain decoding, greedily, and compare them,
token by token. Where they differ, plain decoding's log-probabilities show whether rounding explains
it (a tie) or not (a regression); the comparison continues from DFlash's tokens."""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    about = "check that DFlash writes what plain decoding writes, token by token"
    texts = {"help": about, "description": ABOUT, "epilog": EPILOG}
    parser = add_command(commands, "verify", run_verify, **texts)
    add = parser.add_argument
    add("--target", required=True, help="path or Hugging Face name of the target")
    about = "as for `vllm serve`"
    add("--speculative-config", required=True, type=json_object, metavar="JSON", help=about)
    beside = "held_out.jsonl next to the target's folder, if there is one"
    add_prompts(parser, f"{beside}, and 16 built-in ones")
    about = "requests in flight with DFlash; all texts are written at each (default: 1 8 32)"
    add("--concurrency", **NUMBERS, default=[1, 8, 32], help=about)
    about = "maximum new tokens per text (default: %(default)s)"
    add("--tokens", **NUMBER, default=128, help=about)
    about = "largest difference between the log-probabilities of plain decoding's and DFlash's"
    about += " token that counts as rounding (default: 0.20; 0 in float32)"
    add("--tie", type=not_negative, metavar="NAT", help=about)
    about = "dtype of both engines (default: the model's, or float32 on CPUs without bfloat16)"
    add("--dtype", help=about)
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    about = "also write the result as JSON to this file"
    add("--out", type=Path, metavar="FILE", help=about)


def run_verify(parsed: argparse.Namespace) -> int:
    """Verify and print. Returns the exit code; `cli.main` reports what this raises."""
    prompts = read_prompts(parsed.prompts) if parsed.prompts else default_prompts(parsed.target)
    progress = progress_on()
    result = verify_pair(
        parsed.target,
        parsed.speculative_config,
        prompts,
        GateSettings(tuple(dict.fromkeys(parsed.concurrency)), parsed.tokens, parsed.tie),
        with_dtype(parsed.dtype, progress, parsed.target, parsed.flags),
        progress,
    )
    result.about["command"] = shlex.join(["vllm-dflash", *sys.argv[1:]])
    written = json.dumps(result.to_dict(), indent=1)
    try:  # neither a closed pipe nor a file that cannot be written loses the result
        if parsed.json:
            print(written, flush=True)
        else:
            print_report([make_table(result)], make_notes(result))
    finally:
        if parsed.out:
            parsed.out.parent.mkdir(parents=True, exist_ok=True)
            parsed.out.write_text(written + "\n")
    return result.exit_code


def verify_pair(
    target: str,
    speculative_config: dict[str, Any],
    prompts: list[str],
    settings: GateSettings | None = None,
    flags: Sequence[str] = (),
    progress: Progress | None = None,
) -> Verification:
    """Run `verify` on two servers. Raises as `verify` does.

    `flags`: of `vllm serve`, for both. Their logs are kept if an engine dies.
    """
    if not speculative_config:
        raise ValueError('the speculative config is empty: expected {"method": "dflash", ...}')
    ours = required(speculative_config)
    progress = progress or Progress()
    with temporary_logs("vllm-dflash-verify-") as folder:
        progress.say(f"the engines' logs, until it is done: {folder}")
        result = verify(
            prompts,
            partial(Server, folder / "dflash.log", target, flags, speculative_config=ours),
            partial(plain_server, folder / "plain.log", target, flags),
            settings,
            progress,
        )
    result.about.update(target=target, speculative_config=speculative_config, flags=[*flags])
    return result


def plain_server(log: Path, target: str, flags: Sequence[str] = ()) -> Server:
    """Start a server that decodes plainly, without our plugin. Arguments are those of `Server`."""
    return Server(log, target, flags, environment={"VLLM_PLUGINS": ",".join(other_plugins())})


def required(speculative_config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an engine that does not start if native would run it instead of ours.

    Unless the user says so with `"require": false`, or without our plugin.
    """
    is_loaded = "dflash" in os.environ.get("VLLM_PLUGINS", "dflash").split(",")
    if is_loaded and asks_for_dflash(speculative_config):
        return {"require": True, **speculative_config}
    return speculative_config


def make_table(result: Verification) -> Table:
    """Make the table of results, with one row per concurrency."""
    about = result.about
    title = (
        f"{about['prompts']} prompts, up to {about['tokens']} tokens, {about['dtype']},"
        f" drafted by {about['drafter']}; a tie is up to {result.tie:g} nat"
    )
    rows = []
    for one in result.levels:
        of_texts = one.concurrency, one.identical, one.with_ties, one.with_regressions
        regret = "-" if one.worst is None else f"{one.worst.regret:.3g}"
        length = "-" if one.acceptance_length is None else f"{one.acceptance_length:.2f}"
        counts = *of_texts, one.ties, one.regressions, regret, one.drafts_verified, length
        rows.append([*map(str, counts)])
    # Counts of texts, then of divergences, then of drafts. Must fit a terminal of 100 columns.
    columns = ["concurrency", "identical", "tied", "regressed", "ties", "regressions", "regret"]
    return Table(title, [*columns, "drafts", "acceptance"], rows)


def make_notes(result: Verification) -> list[str]:
    """Return the worst divergence per concurrency, what was not tested, and the verdict."""
    notes = [
        f"worst at concurrency {level.concurrency}: {level.worst}"
        for level in result.levels
        if level.worst is not None
    ]
    notes += [
        f"no draft was verified at concurrency {level.concurrency}, so nothing was tested there:"
        ' add "draft_length": "fixed" to the speculative config to draft in every step.'
        for level in result.levels
        if not level.drafts_verified
    ]
    has_ties = any(level.ties for level in result.levels)
    if result.verdict == "lossless" and has_ties:
        return [*notes, WITH_TIES.format(result.tie)]
    return [*notes, VERDICTS[result.verdict]]
