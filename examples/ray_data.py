"""Offline batch inference over a dataset with Ray Data: each actor is one engine with DFlash.

    scripts/run.sh python examples/ray_data.py                       # the demo pair, 199 prompts
    scripts/run.sh python examples/ray_data.py --engines 2 --format parquet --out out/parquet
    scripts/run.sh python examples/ray_data.py --data prompts.parquet --id-column key \\
        --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --gpus 1

After a crash or Ctrl-C, run the same command again: finished rows are skipped.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from ray_engines.batch_parts import FORMATS
from ray_engines.batch_run import BatchResult, BatchSettings, run
from ray_engines.local_ray import local_ray
from vllm_dflash.tools.arguments import not_negative, positive
from vllm_dflash.tools.console import output_console

DEMO = Path(__file__).parent.parent / "models" / "demo"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default=str(DEMO / "held_out.jsonl"), help="JSONL, Parquet, or text")
    add("--out", type=Path, default=Path("out/ray_data"), help="folder of the parts")
    add("--format", dest="form", choices=FORMATS, default=FORMATS[0])
    add("--model", default=str(DEMO / "target"))
    add("--drafter", default=str(DEMO / "drafter"), help="'' generates without DFlash")
    add("--prompt-column", default="prompt")
    add("--id-column", help="default: rows are numbered, in the order of the files")
    add("--max-tokens", type=positive, default=96)
    add("--temperature", type=not_negative, default=0.0)
    add("--max-model-len", type=positive, default=1024)
    add("--dtype", default="auto")
    add("--enforce-eager", action="store_true")
    add("--engines", type=positive, default=1)
    add("--threads", type=positive, help="of each engine; default: the cores, shared")
    add("--gpus", type=int, default=0, help="of each engine")
    add("--batch", type=positive, default=32, help="rows in flight in an engine, and in a part")
    add("--limit", type=positive, help="only the first so many rows")
    add("--address", help="of a Ray cluster; default: a Ray of its own on this machine")
    add("--verbose", action="store_true", help="show the engines' log")
    return parser.parse_args()


def main() -> None:
    """Run, show progress, and summarise."""
    given = vars(parse())
    address, verbose = given.pop("address"), given.pop("verbose")
    settings = BatchSettings(**given)
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")  # ours is shown instead
    console = output_console()
    # One core more than the machine has: reading needs one while the engines hold all of them.
    with local_ray((os.cpu_count() or 1) + 1, address, show_log=verbose):
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            if console.is_terminal:
                columns = (*Progress.get_default_columns(), MofNCompleteColumn())
                with Progress(*columns, console=console) as progress:
                    task = progress.add_task("Starting engines", total=None)

                    def show(result: BatchResult) -> None:
                        progress.update(
                            task,
                            completed=result.skipped + result.rows,
                            total=result.total,
                            description="Generating" if result.rows else "Starting engines",
                        )

                    result = run(settings, show)
            else:
                result = run(settings, plainly(console))
        except ValueError as error:
            raise SystemExit(str(error)) from error
    console.print(summary(result))
    console.print(f"The parts are in {settings.out}")


def plainly(console: Console) -> Callable[[BatchResult], None]:
    """Print a line for each batch, for logs."""

    def tell(result: BatchResult) -> None:
        console.print(f"{result.skipped + result.rows} of {result.total} rows")

    return tell


def summary(result: BatchResult) -> Table:
    """Summarise what was done, and how fast."""
    table = Table(title="Batch inference")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("rows", str(result.total))
    table.add_row("skipped, done before", str(result.skipped))
    table.add_row("generated", str(result.rows - result.refused))
    table.add_row("refused (see their error)", str(result.refused))
    table.add_row("tokens", str(result.tokens))
    table.add_row("tokens/s", f"{result.tokens_per_second:.0f}" if result.tokens else "")
    table.add_row("acceptance length", f"{result.acceptance_length:.2f}" if result.drafts else "")
    return table


if __name__ == "__main__":
    main()
