"""`vllm-dflash bench`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.arguments import (
    NUMBER,
    NUMBERS,
    add_command,
    add_models,
    add_prompts,
    json_object,
    not_negative,
    positive,
    share,
    whole,
)
from vllm_dflash.tools.bench.sides import BLOCKS, LOOK_UPS, OURS, PLAIN
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, print_report
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.server import flag_names
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_result import Results
    from vllm_dflash.tools.bench.bench_runs import Comparison

FULL: dict[str, Any] = {
    "rounds": 5,
    "concurrency": [1, 2, 4, 8, 16, 32],
    "output_len": 96,
    "temperature": [0.0],
    "native_k": [1, 3, 5, 7],
    "beside": [],
}
QUICK = FULL | {"rounds": 2, "concurrency": [1, 4, 16]}
OF_DATASETS = FULL | {"rounds": 2, "concurrency": [1, 8], "output_len": None, "num_prompts": 80}
OF_STEPS = FULL | {"rounds": 3, "concurrency": [1, 4, 16], "context": [128, 1024]}
"""Defaults of the arguments with these names."""
NOT_OF_STEPS = {"--drafter", "--prompts", "--native-k", "--beside", "--quick", "--temperature"}
NOT_OF_STEPS |= {"--num-prompts", "--dataset-name"}
NOT_OF_DATASETS = {"--prompts", "--quick", "--context"}
"""Arguments without effect where steps, or a set of prompts, are measured."""
OF_SETS = {
    "--skip-chat-template": ("custom", "hf", "speed_bench"),
    "--chat-template-kwargs": ("custom", "speed_bench"),
}
"""Flags of `vllm bench serve` that only these sets use."""
SET_HERE = {"--backend", "--base-url", "--host", "--port", "--model", "--max-concurrency"}
SET_HERE |= {"--tokenizer", "--served-model-name", "--result-dir", "--result-filename"}
OF_ITS_OWN = {"--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"}
"""Flags of servers that are written before `--`."""


def beside(written: str) -> str:
    """Check a value of `--beside`: a name, or JSON of our options. Raises `ArgumentTypeError`."""
    names = BLOCKS, *LOOK_UPS
    if written in names:
        return written
    if not written.startswith("{"):
        raise argparse.ArgumentTypeError(f"{written} is none of {', '.join(names)}")
    options = json_object(written)
    if unknown := {*options} - {*OWN_KEYS, "num_speculative_tokens"}:
        raise argparse.ArgumentTypeError(f"not options of ours: {', '.join(sorted(unknown))}")
    return json.dumps(options)


ABOUT = """Measure plain decoding, vLLM's own DFlash at several fixed K, and ours.
All servers stay up for the whole run; each round measures everything once on each of them
with the client of `vllm bench serve`. Other flags are passed on to it, such as --dataset-path or
--ignore-eos. Flags after -- are those of `vllm serve` for every server, such as --enforce-eager
(servers start sooner, but are slower than in production), --tensor-parallel-size or
--kv-cache-memory-bytes (with it, servers on a GPU start at the same time)."""
EPILOG = f"""examples:
  vllm-dflash bench --quick
  vllm-dflash bench --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts code.jsonl chat.jsonl --temperature 0 0.7
  vllm-dflash bench --native-k 3 7 --beside blocks ngram '{{"draft_tree": "auto"}}' --rounds 9
  vllm-dflash bench --break-even 3 7 --target Qwen/Qwen3-8B
  vllm-dflash bench --dataset-name spec_bench --dataset-path question.jsonl --native-k 3

exit code: 0 success, {COULD_NOT_RUN} could not run, {INTERRUPTED} or 143 interrupted"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line. Names are those of vLLM if it has them."""
    about = "measure plain decoding, vLLM's own DFlash and ours side by side"
    texts = {"help": about, "description": ABOUT, "epilog": EPILOG}
    parser = add_command(commands, "bench", run_bench, **texts)
    pair = parser.add_argument_group("pair (default: the demo pair, widened)")
    add_models(pair)
    add_prompts(pair, "held_out.jsonl of the demo pair; with several files, each is measured", "+")

    add = parser.add_argument_group("servers").add_argument
    about = "draft lengths of vLLM's own DFlash, one server each, up to the drafter's maximum"
    add("--native-k", **NUMBERS | {"nargs": "*"}, help=f"{about} (default: 1 3 5 7)")
    about = (
        "additional servers: ours with other options, as JSON ('{\"draft_window\": 256}'), blocks"
    )
    about += " (ours without free drafts), ngram and suffix (vLLM's methods, which look up drafts"
    about += " in the text; suffix needs arctic-inference)"
    add("--beside", nargs="+", type=beside, metavar="SERVER", help=about)
    about = "maximum tokens per request in every server (default: %(default)s)"
    add("--max-model-len", **NUMBER, default=1024, help=about)
    about = "maximum requests at a time in every server (default: %(default)s)"
    add("--max-num-seqs", **NUMBER, default=64, help=about)
    about = "dtype of every server (default: the model's, or float32 on CPUs without bfloat16)"
    add("--dtype", help=about)
    about = "share of a GPU's memory, divided equally among all servers (default: %(default)s)"
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help=about)

    add = parser.add_argument_group("measurements").add_argument
    about = "requests in flight (default: 1 2 4 8 16 32; with --dataset-name: 1 8)"
    add("--concurrency", **NUMBERS, help=about)
    about = "prompts of a measurement (default: three for each request in flight, at least 4; with"
    add("--num-prompts", **NUMBER, help=f"{about} --dataset-name: 80)")
    about = "maximum new tokens per request (default: 96; with --dataset-name: vLLM's for the set)"
    add("--output-len", **NUMBER, help=about)
    about = "temperatures to measure at (default: 0)"
    add("--temperature", type=not_negative, nargs="+", metavar="T", help=about)
    about = "measure prompts of a set of `vllm bench serve` instead, such as spec_bench or custom"
    add("--dataset-name", metavar="NAME", help=about)
    about = "rounds to measure (default: 5; with --dataset-name: 2)"
    add("--rounds", **NUMBER, help=about)
    about = "rounds to discard, since kernels are prepared at the first batch of each size"
    about += " (default: %(default)s)"
    add("--warmup-rounds", type=whole, default=1, metavar="N", help=about)
    about = "use faster defaults: 2 rounds, concurrency 1 4 16"
    add("--quick", action="store_true", help=about)

    add = parser.add_argument_group("break-even").add_argument
    about = "only time steps of the target that verify K drafts, and plain ones: how many tokens a"
    about += " step must bring on this machine (default K: 3 7 15; concurrency 1 4 16, 3 rounds,"
    about += " steps of answers of --output-len tokens)"
    add("--break-even", type=positive, nargs="*", metavar="K", help=about)
    about = "tokens of each request before these steps (default: 128 1024)"
    add("--context", **NUMBERS, help=about)

    about = "folder for result.json, result.png, raw results and logs"
    about += " (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="FOLDER", help=about)


def settle(parsed: argparse.Namespace) -> None:
    """Set what the user left out.

    Raises:
        ValueError: an argument would have no effect.
    """
    given = {name for name, value in vars(parsed).items() if value not in (None, False)}
    client = flag_names(parsed.client_flags)
    if wrong := client & SET_HERE:
        raise ValueError(f"the benchmark sets {', '.join(sorted(wrong))} itself: leave it out.")
    if wrong := OF_ITS_OWN & (servers := flag_names(parsed.flags)):
        raise ValueError(f"{', '.join(sorted(wrong))} after --: write it before --.")
    if "--enable-prefix-caching" in servers and parsed.break_even is None:
        raise ValueError(
            "--enable-prefix-caching: prompts repeat, so the benchmark measures without."
        )
    flags = client | {f"--{name.replace('_', '-')}" for name in given}
    defaults, name = QUICK if parsed.quick else FULL, parsed.dataset_name
    if parsed.break_even is not None:
        case, defaults = "with --break-even", OF_STEPS
        wrong = NOT_OF_STEPS | {*parsed.client_flags}
        flags |= {*parsed.client_flags}
    elif name is not None:
        case, defaults, wrong = f"with --dataset-name {name}", OF_DATASETS, set(NOT_OF_DATASETS)
        wrong |= {flag for flag, sets in OF_SETS.items() if name not in sets}
    else:
        case, wrong = "without --dataset-name", {"--dataset-path", *OF_SETS}
        if not wrong & flags:
            case, wrong = "without --break-even", {"--context"}
    if not wrong & flags and {"--rounds", "--concurrency"} < flags:
        case, wrong = "beside --rounds and --concurrency", {"--quick"}
    if wrong := wrong & flags:
        raise ValueError(f"{', '.join(sorted(wrong))} would have no effect {case}: leave it out.")
    for name, value in defaults.items():
        if name not in given:
            setattr(parsed, name, value)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code; `cli.main` reports what this raises."""
    settle(parsed)
    wanted = ["pandas", *(["matplotlib"] if parsed.break_even is None else [])]
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} missing: pip install {' '.join(missing)}")
    from vllm_dflash.tools.bench.bench_setup import compare_sides
    from vllm_dflash.tools.bench.break_even import compare_steps

    compare = compare_sides if parsed.break_even is None else compare_steps
    return run_and_report(compare(parsed, progress_on()))


def run_and_report(comparison: Comparison) -> int:
    """Run a comparison, print its tables and draw its plot, also if it is interrupted. Returns the
    exit code."""
    record, out, files = comparison.record, comparison.out, ["result.json"]
    try:
        comparison.run()
    finally:
        if record.rounds_complete:
            print_report(record.tables, record.notes)
            files += _plot(record.results, out)
    print(f"Written: {', '.join(files)} in {out}, and vLLM's own results in raw")
    return 0


def _plot(results: Results, out: Path) -> list[str]:
    """Draw ours beside plain decoding, if both were measured. Returns names of files."""
    if not {OURS, PLAIN} <= {side.name for side in results.sides}:
        (out / "result.png").unlink(missing_ok=True)  # an earlier run's
        return []
    from vllm_dflash.tools.bench.plot import plot_panels

    plot_panels([(results, load) for load in results.loads], out / "result.png")
    return ["result.png"]
