"""What does a GPU make of all this?

    make gpu                                        # or: python benchmarks/gpu
    make gpu ARGS=--again                           # also what is there already
    scripts/run.sh python benchmarks/gpu --dry-run  # on a CPU, Model Runner V2 interpreted

Tests marked `cuda`, `verify`, `parity`, and the demo pair, widened to 1.7B and 8B, on several
engines: under 40 minutes, 25 GB of disk, 20 GB of memory. Writes docs/gpu.md. What has not failed
for this commit on this machine is not run again. Exit code 0: nothing failed, 1: something did,
2: this machine lacks something, 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu.gpu_machine import ROOT, describe_machine, lacking
from gpu.gpu_plan import DEMO, LIMIT, Part, environment, plan, plan_dry_run
from gpu.gpu_report import write_report
from gpu.gpu_run import FAILED, Outcome, kept, run
from vllm_dflash.tools.console import INTERRUPTED, print_report
from vllm_dflash.tools.progress import progress_on

LACKING = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report, and say by the exit code whether all went well."""
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="tiny sizes on a CPU; the report goes to --out")
    add("--again", action="store_true", help="run all parts, whatever is there")
    add("--out", type=Path, metavar="FOLDER", help="(default: out/gpu, or out/gpu-dry-run)")
    add("--docs", type=Path, default=ROOT / "docs", metavar="FOLDER", help="(default: docs)")
    parsed = parser.parse_args(arguments)
    machine = describe_machine()
    if not parsed.dry_run and (line := lacking(machine)):
        print(line, file=sys.stderr)
        return LACKING
    out = (parsed.out or Path("out/gpu-dry-run" if parsed.dry_run else "out/gpu")).resolve()
    if parsed.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        lines = (DEMO / "held_out.jsonl").read_text().splitlines(keepends=True)
        (out / "prompts.jsonl").write_text("".join(lines[:2]))
        return run_all(plan_dry_run(out / "prompts.jsonl"), out, out, machine, parsed)
    return run_all(plan(float(machine["memory.total"]) / 1024), out, parsed.docs, machine, parsed)


def run_all(
    parts: Sequence[Part],
    out: Path,
    docs: Path,
    machine: Mapping[str, str],
    options: argparse.Namespace,
) -> int:
    """Every part that needs it, one after the other; then the report, also after a Ctrl-C."""
    progress, variables = progress_on(), environment(is_dry=options.dry_run)
    minutes = sum(part.seconds for part in parts) / 60
    progress.say(f"{len(parts)} parts, {minutes:.0f} minutes are planned. Ctrl-C ends it.")
    outcomes: list[Outcome] = []
    code = 0
    try:
        for number, part in enumerate(parts, 1):
            name = f"{number} of {len(parts)}, {part.name}"
            found = None if options.again else kept(part, out, machine)
            if found is None:
                with progress.stage(name, LIMIT * part.seconds) as tell:
                    found = run(part, out, machine, variables, tell)
            outcomes.append(found)
            progress.say(f"{name}: {found.outcome}: {found.words}")
    except KeyboardInterrupt:
        code = INTERRUPTED
    tables = write_report(parts, outcomes, machine, docs)
    print_report(tables, [f"gpu.md, gpu.png and gpu.json are in {docs}, logs in {out / 'log'}"])
    return code or int(any(one.outcome == FAILED for one in outcomes))
