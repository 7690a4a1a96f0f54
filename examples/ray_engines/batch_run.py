"""A batch run: a pool of engines generates for a dataset and writes its parts (Ray Data)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_engines.batch_parts import ID, check_claimed, claim, finished_ids, write_part
from ray_engines.local_ray import engine_environment, threads_of_each

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True)
class BatchSettings:
    """Settings of a batch run."""

    data: str
    """A .jsonl, .json or .parquet file, a text file with one prompt per line, or a folder of
    Parquet files."""
    out: Path
    model: str
    drafter: str | None
    form: str = "jsonl"
    prompt_column: str = "prompt"
    id_column: str | None = None
    """None: rows are numbered in file order, which must not change between runs."""
    max_tokens: int = 96
    temperature: float = 0.0
    max_model_len: int = 1024
    dtype: str = "auto"
    enforce_eager: bool = False
    engines: int = 1
    threads: int | None = None
    """Threads per engine. None: the machine's cores divided by `engines`."""
    gpus: int = 0
    """GPUs per engine."""
    batch: int = 32
    """Rows in flight per engine, and rows per part."""
    limit: int | None = None
    """Use only this many rows from the start of the dataset."""

    def about(self) -> dict[str, Any]:
        """Settings that determine the output; a folder holds parts of one such run."""
        names = "data model drafter form prompt_column id_column max_tokens temperature"
        return {name: getattr(self, name) for name in f"{names} max_model_len dtype".split()}

    @property
    def num_threads(self) -> int:
        """Threads per engine."""
        return self.threads or threads_of_each(self.engines)


@dataclass
class BatchResult:
    """Counts of a run."""

    total: int
    """Rows in the dataset."""
    skipped: int
    """Rows finished by earlier runs."""
    rows: int = 0
    """Rows written by this run, including those with an error."""
    refused: int = 0
    """Rows written with an error, because the prompt does not fit or is not text."""
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    began: float = float("inf")
    ended: float = float("-inf")
    """When the first batch began and the last one ended, without the engines' start."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput from the first batch to the last; 0 if there was none."""
        return self.tokens / (self.ended - self.began) if self.ended > self.began else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step with drafts; 0 if there was none."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def add(self, batch: dict[str, Any]) -> None:
        """Add the counts of one batch."""
        for name in ("rows", "refused", "tokens", "drafts", "accepted"):
            setattr(self, name, getattr(self, name) + int(batch[name]))
        self.began = min(self.began, float(batch["began"]))
        self.ended = max(self.ended, float(batch["ended"]))


class Generator:
    """One engine in a Ray Data actor. Its core runs in the actor's process and ends with it.

    Generates for a batch, writes its part, and returns the counts.
    """

    def __init__(self, settings: BatchSettings) -> None:
        """Start the engine.

        Raises:
            ValueError: this machine does not see the run's folder at `out`.
        """
        check_claimed(settings.out)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        drafts = {"method": "dflash", "model": settings.drafter}
        self._llm = LLM(
            settings.model,
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
            enforce_eager=settings.enforce_eager,
            max_num_seqs=settings.batch,
            tensor_parallel_size=max(1, settings.gpus),
            speculative_config=drafts if settings.drafter else None,
            disable_log_stats=False,
        )
        self._sampling = SamplingParams(
            temperature=settings.temperature, max_tokens=settings.max_tokens
        )
        self._settings = settings

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Generate for `batch` (columns of the dataset). Returns one row for `BatchResult.add`."""
        began = time.time()
        drafts, accepted = self._count("drafts"), self._count("accepted_tokens")
        prompts = [_plain(prompt) for prompt in batch[self._settings.prompt_column]]
        rows = self._generate([_plain(value) for value in batch[ID]], prompts)
        write_part(self._settings.out, rows, self._settings.form)
        return {
            "rows": [len(rows)],
            "refused": [sum(row["error"] is not None for row in rows)],
            "tokens": [sum(row["tokens"] for row in rows)],
            "drafts": [self._count("drafts") - drafts],
            "accepted": [self._count("accepted_tokens") - accepted],
            "began": [began],
            "ended": [time.time()],
        }

    def _generate(self, ids: list[Any], prompts: list[Any]) -> list[dict[str, Any]]:
        """Return one output row per prompt; rows of unusable prompts have an error."""
        errors = [self._error_of(prompt) for prompt in prompts]
        good = [prompt for prompt, error in zip(prompts, errors, strict=True) if error is None]
        outputs = iter(self._llm.generate(good, self._sampling, use_tqdm=False))
        rows = []
        for row_id, prompt, error in zip(ids, prompts, errors, strict=True):
            row = {ID: row_id, "prompt": prompt if isinstance(prompt, str) else None}
            if error is None:
                answer = next(outputs).outputs[0]
                row |= {"text": answer.text, "tokens": len(answer.token_ids)}
                row |= {"finish_reason": answer.finish_reason, "error": None}
            else:
                row |= {"text": None, "tokens": 0, "finish_reason": None, "error": error}
            rows.append(row)
        return rows

    def _error_of(self, prompt: Any) -> str | None:
        """Say why a prompt is unusable; None if it is fine."""
        if prompt is None or prompt != prompt:  # NaN: a missing value in a column of numbers
            return "there is no prompt"
        if not isinstance(prompt, str):
            return f"the prompt is not text: {prompt!r}"
        limit = self._settings.max_model_len
        length = len(self._llm.get_tokenizer().encode(prompt))
        fits = 0 < length < limit
        return None if fits else f"{length} tokens; from 1 to {limit - 1} fit max_model_len {limit}"

    def _count(self, name: str) -> int:
        """Read one of vLLM's counters; 0 in an engine without speculative decoding."""
        full_name = f"vllm:spec_decode_num_{name}"
        return sum(one.value for one in self._llm.get_metrics() if one.name == full_name)


def _plain(value: Any) -> Any:
    """Convert numpy numbers to Python's, for JSON."""
    return value.item() if hasattr(value, "item") else value


def run(settings: BatchSettings, tell: Callable[[BatchResult], None]) -> BatchResult:
    """Generate for the unfinished rows, on the Ray cluster that this process is connected to.

    `tell` is called before the first batch and after each.

    Raises:
        ValueError: `out` holds another run's parts, the dataset lacks a column, or an id is
            missing or not unique.
    """
    import ray.data

    claim(settings.out, settings.about())
    # Row numbers, and the rows within `limit`, must be the same in the next run.
    ordered = settings.id_column is None or settings.limit is not None
    ray.data.DataContext.get_current().execution_options.preserve_order = ordered
    rows = read(settings)
    finished = finished_ids(settings.out)
    total = rows.count() if settings.id_column is None else count_ids(rows, settings.id_column)
    left = rows.filter(lambda row: str(row[ID]) not in finished) if finished else rows
    num_left = left.count() if finished else total
    result = BatchResult(total, skipped=total - num_left)
    tell(result)
    if num_left:
        # One block per batch, so that each task is one batch.
        blocks = left.repartition(target_num_rows_per_block=settings.batch)
        batches = blocks.map_batches(
            Generator,
            fn_constructor_args=(replace(settings, out=settings.out.absolute()),),
            batch_size=settings.batch,
            compute=ray.data.ActorPoolStrategy(size=settings.engines),
            # One fewer than its threads: tasks that read the data need a core, too.
            num_cpus=max(0.5, settings.num_threads - 1),
            num_gpus=settings.gpus,
            runtime_env={"env_vars": engine_environment(settings.num_threads)},
        )
        for batch in batches.iter_rows():
            result.add(batch)
            tell(result)
    return result


def read(settings: BatchSettings) -> Dataset:
    """Read the dataset's prompts and their ids (column "id")."""
    import ray.data

    paths = settings.data
    suffix = Path(paths).suffix
    prompt = settings.prompt_column
    if suffix == ".parquet" or Path(paths).is_dir():
        rows = ray.data.read_parquet(paths)
    elif suffix in (".jsonl", ".json"):
        rows = ray.data.read_json(paths, lines=suffix == ".jsonl")
    else:
        rows = ray.data.read_text(paths).rename_columns({"text": prompt})
    columns = rows.schema().names
    for column in (prompt, settings.id_column):
        if column is not None and column not in columns:
            raise ValueError(f"{paths} has no column {column!r}: it has {', '.join(columns)}")
    if settings.limit is not None:
        rows = rows.limit(settings.limit)
    if settings.id_column is None:
        rows = rows.select_columns([prompt])
        return ray.data.range(rows.count()).zip(rows)  # range's only column is called "id"
    rows = rows.select_columns([settings.id_column, prompt])
    return rows if settings.id_column == ID else rows.rename_columns({settings.id_column: ID})


def count_ids(rows: Dataset, column: str) -> int:
    """Count the rows and check their ids. `column`: the user's name of the id column, for messages.

    Raises:
        ValueError: a row has no id, or two rows have the same id.
    """
    seen: set[str] = set()
    for row in rows.select_columns([ID]).iter_rows():
        if row[ID] is None:
            raise ValueError(f"a row has no value in column {column!r}; ids are needed to resume")
        if str(row[ID]) in seen:
            raise ValueError(
                f"column {column!r} holds {row[ID]!r} more than once: leave out --id-column to"
                " number the rows instead"
            )
        seen.add(str(row[ID]))
    return len(seen)
