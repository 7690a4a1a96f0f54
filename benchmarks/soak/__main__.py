"""Does a server stand ten minutes of clients of all kinds?

    scripts/run.sh python benchmarks/soak.py
    scripts/run.sh python benchmarks/soak.py --minutes 3 --plain     # vLLM alone, to compare

`vllm serve` with DFlash on the demo pair, and 32 clients who complete, chat, stream, hang up, ask
too much, and send rubbish. Exits with 1 where anything of the table "What must hold" did not.
Latencies are worth no more than the machine is quiet; the report says how busy others kept it.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from vllm_dflash.tools.bench.soak.clients import Tally
from vllm_dflash.tools.bench.soak.report import write_report
from vllm_dflash.tools.bench.soak.run import Settings, Tell, soak
from vllm_dflash.tools.bench.soak.server import Sample
from vllm_dflash.tools.bench.soak.verdict import Limits

DEMO = Path(__file__).parent.parent / "models" / "demo"


def parse() -> Settings:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", type=Path, default=DEMO, help="folder with target/ and drafter/")
    add("--prompts", type=Path, default=DEMO / "held_out.jsonl")
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
    """What there is to say in between."""
    said = f"{tally.total} requests, {len(tally.faults)} faults"
    return said if sample is None else f"{said}, {sample.total_rss / (1 << 20):.0f} MiB"


def plainly(console: Console) -> Tell:
    """A line a minute, for logs."""
    minutes_told = 0

    def tell(seconds: float, tally: Tally, sample: Sample | None) -> None:
        nonlocal minutes_told
        if seconds >= 60 * (minutes_told + 1):
            minutes_told += 1
            console.print(f"{minutes_told} min: {in_words(tally, sample)}")

    return tell


def main() -> None:
    """Soak, report, and say by the exit code whether all held."""
    settings, console = parse(), Console()
    if console.is_terminal:
        columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as progress:
            task = progress.add_task("Soaking", total=60 * settings.minutes, said="starting")
            soaked = soak(
                settings,
                lambda seconds, tally, sample: progress.update(
                    task, completed=seconds, said=in_words(tally, sample)
                ),
            )
    else:
        soaked = soak(settings, plainly(console))
    for table in write_report(soaked):
        console.print(table.rich())
    console.print(f"\nJSON, Markdown and figure are in {settings.out}")
    raise SystemExit(0 if soaked.held else 1)


if __name__ == "__main__":
    main()
