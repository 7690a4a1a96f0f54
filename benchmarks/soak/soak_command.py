"""Does a server survive ten minutes of all kinds of clients?

    scripts/run.sh python benchmarks/soak
    scripts/run.sh python benchmarks/soak --minutes 3 --plain     # vLLM alone, to compare

Runs `vllm serve` with DFlash on the demo pair, and 32 clients that complete, chat, stream, hang up,
ask for too much, and send rubbish. Exits with 1 if a row of the table "What must hold" did not
hold. Latencies mean little on a busy machine; the report says how busy other processes kept it.
"""

import argparse
from pathlib import Path

from demo_models import DEMO, HELD_OUT
from soak.checks import Limits
from soak.clients import Tally
from soak.soak_report import write_report
from soak.soak_run import Settings, soak
from soak.soaked_server import Sample
from vllm_dflash.tools.console import print_report, terminable
from vllm_dflash.tools.progress import progress_on


def parse() -> Settings:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", type=Path, default=DEMO, help="folder with target/ and drafter/")
    add("--prompts", type=Path, default=HELD_OUT)
    add("--out", type=Path, default=Path("out/soak"))
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=32)
    add("--max-model-len", type=int, default=512)
    add("--plain", action="store_true", help="vLLM without a drafter, to compare")
    add("--most-growth", type=float, default=2.0, metavar="MIB", help="a minute, second half")
    add("--most-slowdown", type=float, default=1.3, metavar="X", help="last third against first")
    add("--most-shutdown", type=float, default=30.0, metavar="SECONDS")
    add("arguments", nargs="*", help="behind --: more arguments of vllm serve")
    given = vars(parser.parse_args())
    given["limits"] = Limits(
        given.pop("most_growth"), given.pop("most_slowdown"), given.pop("most_shutdown")
    )
    given["arguments"] = tuple(given["arguments"])
    return Settings(**given)


def in_words(tally: Tally, sample: Sample | None) -> str:
    """Return a line of progress."""
    said = f"{tally.total} requests, {len(tally.faults)} faults"
    return said if sample is None else f"{said}, {sample.total_rss / (1 << 20):.0f} MiB"


def main() -> None:
    """Soak and report. The exit code says whether all checks held."""
    settings, progress = parse(), progress_on()
    minutes_told = 0
    with terminable(), progress.stage("soaking", 60 * settings.minutes) as tell:

        def show(seconds: float, tally: Tally, sample: Sample | None) -> None:
            nonlocal minutes_told
            said = in_words(tally, sample)
            tell(seconds, said)
            if seconds >= 60 * (minutes_told + 1):
                minutes_told += 1
                progress.say(f"{minutes_told} min: {said}")

        soaked = soak(settings, show)
    print_report(write_report(soaked), [f"JSON, Markdown and figure are in {settings.out}"])
    raise SystemExit(0 if soaked.held else 1)
