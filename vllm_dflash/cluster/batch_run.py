"""A batch run: what is left of a dataset, through a pool of engines, into parts (Ray Data)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.cluster.batch_parts import ID, check_claimed, claim, finished_ids, write_part
from vllm_dflash.cluster.local_ray import engine_environment, threads_of_each

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True)
class BatchSettings:
    """What is to be done."""

    data: str
    """A file: .jsonl, .json, .parquet, or text with a prompt a line; or a folder of Parquet."""
    out: Path
    model: str
    drafter: str | None
    form: str = "jsonl"
    prompt_column: str = "prompt"
    id_column: str | None = None
    """None: rows are numbered in the order of the files, which must not change between runs."""
    max_tokens: int = 96
    temperature: float = 0.0
    max_model_len: int = 1024
    dtype: str = "auto"
    enforce_eager: bool = False
    engines: int = 1
    threads: int | None = None
    """Threads of each engine. None: the machine's cores, shared."""
    gpus: int = 0
    """GPUs of each engine."""
    batch: int = 32
    """Rows in flight in an engine, and in a part."""
    limit: int | None = None
    """Only the first so many rows."""

    def about(self) -> dict[str, Any]:
        """What decides about the output: a folder holds parts of one such run."""
        names = "data model drafter form prompt_column id_column max_tokens temperature"
        return {name: getattr(self, name) for name in f"{names} max_model_len dtype".split()}

    @property
    def num_threads(self) -> int:
        """Threads of one engine."""
        return self.threads or threads_of_each(self.engines)


@dataclass
class BatchResult:
    """What a run did."""

    total: int
    """Rows of the dataset."""
    skipped: int
    """Done by earlier runs."""
    rows: int = 0
    """Written by this one, those with an error included."""
    refused: int = 0
    """Written with an error: their prompts do not fit, or are no text."""
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    began: float = float("inf")
    ended: float = float("-inf")
    """When the first batch began and the last one ended; engines start before that."""

    @property
    def tokens_per_second(self) -> float:
        """While rows were generated; 0 where none was."""
        return self.tokens / (self.ended - self.began) if self.ended > self.began else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verify step with drafts; 0 where there was none."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def add(self, batch: dict[str, Any]) -> None:
        """Count what an engine said of one batch."""
        for name in ("rows", "refused", "tokens", "drafts", "accepted"):
            setattr(self, name, getattr(self, name) + int(batch[name]))
        self.began = min(self.began, float(batch["began"]))
        self.ended = max(self.ended, float(batch["ended"]))


class Generator:
    """One engine, in an actor that Ray Data hands rows to. Whatever ends the actor ends all of it.

    Generates for a batch, writes its part, and says what that took.
    """

    def __init__(self, settings: BatchSettings) -> None:
        """Start the engine.

        Raises:
            ValueError: `out` is not the folder of the run that this machine sees.
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
        """`batch`: columns of the dataset. Returns one row, for `BatchResult.add`."""
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
        """A row of the output for each prompt; one that cannot be generated from has an error."""
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
        """Why nothing can be generated from this prompt."""
        if prompt is None or prompt != prompt:  # in a column of numbers and nothing, it is NaN
            return "there is no prompt"
        if not isinstance(prompt, str):
            return f"the prompt is not a text but {prompt!r}"
        limit = self._settings.max_model_len
        length = len(self._llm.get_tokenizer().encode(prompt))
        fits = 0 < length < limit
        return None if fits else f"{length} tokens; from 1 to {limit - 1} fit max_model_len {limit}"

    def _count(self, name: str) -> int:
        """One of vLLM's counters; 0 in an engine without drafts, which does not have it."""
        full_name = f"vllm:spec_decode_num_{name}"
        return sum(one.value for one in self._llm.get_metrics() if one.name == full_name)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numpy's numbers become Python's."""
    return value.item() if hasattr(value, "item") else value


def run(settings: BatchSettings, tell: Callable[[BatchResult], None]) -> BatchResult:
    """Do what is left, in the Ray this process is connected to. `tell` is called after each batch.

    Raises:
        ValueError: `out` holds another run's parts, the dataset lacks a column, or ids are not
            one for each row.
    """
    import ray.data

    claim(settings.out, settings.about())
    # Numbers, and the first so many rows, are to be the same ones next time.
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
        # So that a task is a batch.
        blocks = left.repartition(target_num_rows_per_block=settings.batch)
        batches = blocks.map_batches(
            Generator,
            fn_constructor_args=(replace(settings, out=settings.out.absolute()),),
            batch_size=settings.batch,
            compute=ray.data.ActorPoolStrategy(size=settings.engines),
            # A core less than threads, for tasks that read the data need one, too.
            num_cpus=max(0.5, settings.num_threads - 1),
            num_gpus=settings.gpus,
            runtime_env={"env_vars": engine_environment(settings.num_threads)},
        )
        for batch in batches.iter_rows():
            result.add(batch)
            tell(result)
    return result


def read(settings: BatchSettings) -> Dataset:
    """The dataset's prompts and their ids (column "id")."""
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
        return ray.data.range(rows.count()).zip(rows)  # its only column is called "id"
    rows = rows.select_columns([settings.id_column, prompt])
    return rows if settings.id_column == ID else rows.rename_columns({settings.id_column: ID})


def count_ids(rows: Dataset, column: str) -> int:
    """How many rows there are. `column`: what the user calls that of the ids.

    Raises:
        ValueError: a row has no id, or that of another row: one would count as the other.
    """
    seen: set[str] = set()
    for row in rows.select_columns([ID]).iter_rows():
        if row[ID] is None:
            raise ValueError(f"a row has nothing in column {column!r}; ids are needed to resume")
        if str(row[ID]) in seen:
            raise ValueError(
                f"column {column!r} holds {row[ID]!r} more than once: without --id-column, rows are"
                " numbered"
            )
        seen.add(str(row[ID]))
    return len(seen)
