"""Check and measure vllm-dflash on a GPU.

    make gpu                                        # or: python benchmarks/gpu
    make gpu ARGS=--list                            # names of parts, and how long they take
    make gpu ARGS="--within 540"                    # nothing runs beyond 540 s; again: goes on
    make gpu ARGS="--part texts"                    # a group: texts, speed, drafters, sound, rest
    make gpu ARGS="--part graphs --part 8B"         # parts by name, any number of them
    make gpu ARGS="--part texts --at-once 4"        # at the same time, if there are enough cores
    make gpu ARGS=--report                          # report what is in out/gpu/parts; no GPU
    make gpu ARGS=--again                           # repeat finished parts, too
    scripts/run.sh python benchmarks/gpu --dry-run  # on an emulated GPU

Compares kernels with PyTorch and the demo pair's text with plain decoding's. Runs the tests marked
`cuda`, then `parity` and a soak, and measures the demo pair, widened to 1.7B and 8B, on several
engines. This takes an hour, 20 GB of memory for models, and half of that on the GPU. No part takes
more than eight minutes. Each part writes its outcome to out/gpu/parts. docs/gpu.md reports all
outcomes of one kind of GPU, versions and sources. A part that did not fail is not run again.

Exit code 0: nothing failed, 1: something did, 2: this machine lacks something or a name is unknown,
130: interrupted, 143: terminated.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil

from demo_models import HELD_OUT
from gpu.gpu_machine import ROOT, describe_machine, kind_of, lacking
from gpu.gpu_models import forget_models
from gpu.gpu_plan import LONGEST, Part, chosen, environment, list_of, plan, plan_dry_run
from gpu.gpu_report import write_report
from gpu.gpu_run import FAILED, Outcome, kept, read_outcomes, run
from vllm_dflash.tools.console import INTERRUPTED, print_report, terminable
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.tables import Table

LACKING = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report. The exit code says whether all went well."""
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", action="append", default=[], metavar="NAME", help="a part or a group of them")
    add("--list", action="store_true", help="name parts and groups, with seconds; run nothing")
    add("--within", type=float, metavar="SECONDS", help="begin and run nothing beyond that")
    add("--at-once", type=int, default=1, metavar="N", help="parts at the same time (not benches)")
    add("--report", action="store_true", help="only write the report of what is there")
    add(
        "--dry-run",
        action="store_true",
        help="tiny, on an emulated GPU; reports to --out",
    )
    add("--again", action="store_true", help="run all parts, whatever is there")
    add("--out", type=Path, metavar="FOLDER", help="(default: out/gpu, or out/gpu-dry-run)")
    add("--docs", type=Path, default=ROOT / "docs", metavar="FOLDER", help="(default: docs)")
    parsed = parser.parse_args(arguments)
    out = (parsed.out or Path("out/gpu-dry-run" if parsed.dry_run else "out/gpu")).resolve()
    machine = describe_machine()
    whole = plan_dry_run(out / "prompts.jsonl") if parsed.dry_run else plan()
    try:
        parts = chosen(whole, parsed.part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return LACKING
    if parsed.list:
        print_report([list_of(parts)])
        return 0
    if parsed.report:
        return report_alone(whole, out, parsed.docs, machine)
    if not parsed.dry_run and (line := lacking(machine)):
        print(line, file=sys.stderr)
        return LACKING
    if parsed.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        lines = HELD_OUT.read_text().splitlines(keepends=True)
        (out / "prompts.jsonl").write_text("".join(lines[:2]))
        parsed.docs = out
    try:
        with terminable():
            return run_all(parts, whole, out, machine, parsed)
    finally:
        forget_models()


def run_all(
    parts: Sequence[Part],
    whole: Sequence[Part],
    out: Path,
    machine: Mapping[str, str],
    options: argparse.Namespace,
) -> int:
    """Run every part that needs it, with a report after each. `whole` is the plan they are from."""
    progress, variables = progress_on(), environment(is_dry=options.dry_run)
    minutes = sum(part.seconds for part in parts) / 60
    progress.say(f"{len(parts)} parts, {minutes:.0f} minutes are planned. Ctrl-C ends it.")
    ends = time.monotonic() + (options.within or float("inf"))
    outcomes: list[Outcome] = []
    code = 0

    def run_one(number: int, part: Part) -> Outcome | None:
        name = f"{number} of {len(parts)}, {part.name}"
        found = None if options.again else kept(part, out, machine)
        if found is None:
            left = ends - time.monotonic()
            if left < part.seconds / 2:
                progress.say(f"{name}: not begun, {max(0, left):.0f} s are left")
                return None
            own, limit = dict(variables), min(left, part.limit)
            if options.at_once > 1:
                # All are slower than planned, and each needs its own cache of compiled graphs.
                own["VLLM_CACHE_ROOT"] = str(out / "cache" / part.slug)
                limit = min(left, LONGEST)
            with progress.stage(name, limit) as tell:
                found = run(part, out, machine, own, tell, limit)
        progress.say(f"{name}: {found.outcome}: {found.words}")
        return found

    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = [pool.submit(run_one, *numbered) for numbered in enumerate(parts, 1)]
        try:
            for job in as_completed(jobs):
                if found := job.result():
                    outcomes.append(found)
                    report(whole, out, options.docs, machine)
        except KeyboardInterrupt:
            code, ends = INTERRUPTED, 0.0
            pool.shutdown(wait=False, cancel_futures=True)
            for child in psutil.Process().children():
                child.send_signal(signal.SIGINT)
    print_report(
        report(whole, out, options.docs, machine),
        [f"gpu.md and gpu.json are in {options.docs}, logs in {out / 'log'}"],
    )
    return code or int(any(one.outcome == FAILED for one in outcomes))


def report(whole: Sequence[Part], out: Path, docs: Path, machine: Mapping[str, str]) -> list[Table]:
    """Report outcomes of this kind of machine and these sources together; name the rest."""
    found = read_outcomes(out)
    ours = [one for one in found if kind_of(one.machine) == kind_of(machine)]
    return write_report(whole, ours, [one for one in found if one not in ours], docs)


def report_alone(whole: Sequence[Part], out: Path, docs: Path, machine: Mapping[str, str]) -> int:
    """Report outcomes copied from elsewhere. The last one names their machine."""
    found = read_outcomes(out)
    if not found:
        print(f"there are no outcomes in {out / 'parts'}", file=sys.stderr)
        return LACKING
    theirs = found[-1].machine
    tables = report(whole, out, docs, theirs)
    notes = [f"gpu.md and gpu.json are in {docs}"]
    if theirs["sources"] != machine["sources"]:
        notes.append("These outcomes are of other sources than those that lie here.")
    print_report(tables, notes)
    return 0
