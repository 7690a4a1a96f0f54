"""Standard prompts: the sets that `vllm bench serve` knows, read from files by vLLM's classes."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_dflash.compatibility import check_vllm
from vllm_dflash.tools.arguments import add_number, json_object, not_negative, positive

ON_GITHUB = "https://raw.githubusercontent.com/"
ON_HUB = "hf download --local-dir FOLDER --repo-type dataset "
SPEED_BENCH, SPEED_SUBSET = "speed_bench", "qualitative.jsonl"
SETS = {
    "spec_bench": (
        "SpecBench",
        f"wget {ON_GITHUB}hemingkx/Spec-Bench/refs/heads/main/data/spec_bench/question.jsonl",
    ),
    SPEED_BENCH: (
        "SpeedBench",
        f"curl -LsSf {ON_GITHUB}NVIDIA-NeMo/Skills/refs/heads/main/nemo_skills/dataset/speed-bench"
        "/prepare.py | python3 -",
    ),
    "gsm8k": ("GSM8KDataset", f"{ON_HUB}openai/gsm8k"),
    "humaneval": ("HumanEvalDataset", f"{ON_HUB}openai/openai_humaneval"),
    "mt_bench": ("MTBenchDataset", f"{ON_HUB}philschmid/mt-bench"),
    "blazedit": ("BlazeditDataset", f"{ON_HUB}vdaita/edit_5k_char"),
    "aimo": ("AIMODataset", f"{ON_HUB}AI-MO/aimo-validation-aime"),
    "custom": ("CustomDataset", 'write lines of {"prompt": "...", "category": "..."}'),
}
"""Name of a set: vLLM's class that reads it, and how to get it."""
OUTPUT_TOKENS = 256
"""Maximum new tokens if vLLM's class does not define them."""


class Asked(NamedTuple):
    """A request."""

    category: str
    prompt: str | Sequence[int]
    tokens: int
    """Maximum new tokens."""


class Dataset(NamedTuple):
    """Requests from a set, and how to send them to an engine."""

    name: str
    requests: list[Asked]
    sampling: dict[str, Any]
    """Arguments of vLLM's `SamplingParams`."""
    template: dict[str, Any] | None
    """Extra arguments of the chat template; None: use prompts as they are."""


def add_dataset(what: argparse._ActionsContainer, options: argparse._ActionsContainer) -> None:
    """Add the set to the alternatives in `what`, and its options, named as in vLLM."""
    about = "measure prompts of a standard set instead, with results per category"
    what.add_argument("--dataset-name", choices=SETS, help=about)
    about = "the set's .jsonl, .json or .parquet file; if missing, bench prints how to get it"
    options.add_argument("--dataset-path", type=Path, metavar="FILE", help=about)
    add_number(options, "--num-prompts", 80, "prompts of the set, from its categories in turn")
    about = "maximum new tokens per prompt of the set (default: vLLM's for the set, or 256)"
    options.add_argument("--output-len", type=positive, metavar="N", help=about)
    about = "temperatures to measure at; only one for a set (default: 0)"
    kinds: dict[str, Any] = {"type": not_negative, "nargs": "+", "default": [0.0], "metavar": "T"}
    options.add_argument("--temperature", **kinds, help=about)
    about = 'chat template arguments for the set, such as {"enable_thinking": false}'
    kwargs: dict[str, Any] = {"type": json_object, "default": {}, "metavar": "JSON"}
    options.add_argument("--chat-template-kwargs", **kwargs, help=about)
    about = "use the set's prompts without the chat template"
    options.add_argument("--skip-chat-template", action="store_true", help=about)
    about = "continue every answer to its maximum length"
    options.add_argument("--ignore-eos", action="store_true", help=about)


def given_dataset(parsed: argparse.Namespace) -> Dataset | None:
    """Read the set that the user named, if any. Raises ValueError if it cannot be read."""
    name = parsed.dataset_name
    if name is None:
        if parsed.dataset_path is not None:
            raise ValueError("--dataset-path needs --dataset-name.")
        return None
    if len(parsed.temperature) > 1:
        raise ValueError("--dataset-name takes only one --temperature.")
    requests = read_dataset(name, parsed.dataset_path, parsed.output_len)[: parsed.num_prompts]
    sampling = {"temperature": parsed.temperature[0], "ignore_eos": parsed.ignore_eos}
    template = None if parsed.skip_chat_template else parsed.chat_template_kwargs
    return Dataset(name, requests, sampling, template)


def read_dataset(name: str, path: Path | None, tokens: int | None = None) -> list[Asked]:
    """Read all requests of a set, taking one from each category in turn.

    `tokens`: maximum new tokens of an answer; None: vLLM's default for the set.

    Raises:
        ValueError: the file does not exist or is not of this set. The message says how to get it.
    """
    reader, how = SETS[name]
    if path is None:
        raise ValueError(f"--dataset-name needs --dataset-path FILE. To get {name}: {how}")
    file = path / SPEED_SUBSET if name == SPEED_BENCH and path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{str(file)!r} is not a file. To get {name}: {how}")
    check_vllm("datasets")
    try:
        return _read(name, file, reader, tokens)
    except ImportError as error:
        raise ValueError(f'{error}: pip install "vllm-dflash[bench]"') from error
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} cannot be read as {name} ({wrong}). To get it: {how}") from error


def _read(name: str, file: Path, class_name: str, tokens: int | None) -> list[Asked]:
    import pandas  # vLLM's classes need it as well
    from vllm.benchmarks.datasets import datasets

    if file.suffix == ".parquet":
        frame = pandas.read_parquet(file)
    else:
        frame = pandas.read_json(file, lines=".jsonl" in file.suffixes, convert_dates=False)
    rows = frame.to_dict("records")
    reader: Any = getattr(datasets, class_name)
    if issubclass(reader, datasets.HuggingFaceDataset):  # would download its rows from the hub
        members = {"load_data": lambda self: setattr(self, "data", rows)}
        reader = type(class_name, (reader,), members)
    opened = reader(  # readers ignore arguments they do not know
        dataset_path=str(file.parent if name == SPEED_BENCH else file),
        dataset_subset=file.stem,
        dataset_split="",
        disable_shuffle=True,
    )
    samples = opened.sample(
        tokenizer=lambda text: SimpleNamespace(input_ids=()),  # an engine tokenizes later
        num_requests=len(rows),
        output_len=tokens or getattr(reader, "DEFAULT_OUTPUT_LEN", OUTPUT_TOKENS),
        skip_chat_template=True,
        no_oversample=True,
    )
    by_category: dict[str, list[Asked]] = defaultdict(list)
    for one in samples:
        category = str(rows[int(one.request_id)].get("category", name))
        by_category[category].append(Asked(category, one.prompt, one.expected_output_len))
    in_turns = chain.from_iterable(zip_longest(*by_category.values()))
    return [one for one in in_turns if one is not None]
