"""A batch run: what is left of a dataset, through a pool of engines, into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.cluster.batches.generator import Generator
from vllm_dflash.cluster.batches.parts import ID, claim, finished_ids
from vllm_dflash.cluster.shared_machine import engine_environment, threads_of_each

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True)
class BatchSettings:
    """What is to be done."""

    data: str
    """File or folder: .jsonl, .json, .parquet, or text with a prompt a line."""
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
    """Of each engine. None: the machine's cores, shared."""
    gpus: int = 0
    """Of each engine."""
    batch: int = 32
    """Rows in flight in an engine, and in a part."""
    limit: int | None = None
    """Only the first so many rows."""

    def about(self) -> dict[str, Any]:
        """What decides about the output: a folder holds parts of one such run."""
        names = "data model drafter form prompt_column id_column max_tokens temperature"
        return {name: getattr(self, name) for name in f"{names} max_model_len dtype".split()}

    def engine(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        arguments = {"model": self.model, "max_model_len": self.max_model_len}
        arguments |= {"dtype": self.dtype, "enforce_eager": self.enforce_eager}
        arguments |= {"max_num_seqs": self.batch, "tensor_parallel_size": max(1, self.gpus)}
        if self.drafter:
            arguments["speculative_config"] = {"method": "dflash", "model": self.drafter}
        return arguments

    @property
    def num_threads(self) -> int:
        """Threads of one engine."""
        return self.threads or threads_of_each(self.engines)

    @property
    def num_cpus(self) -> float:
        """Ray's share for one engine: a core less, for tasks that read the data need one, too."""
        return max(0.5, self.num_threads - 1)

    def environment(self) -> dict[str, str]:
        """Variables of an actor."""
        return engine_environment(self.num_threads)


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
    """Of the first and last batch; engines start before that."""

    @property
    def tokens_per_second(self) -> float:
        """While rows were generated; 0 where none was."""
        return self.tokens / (self.ended - self.began) if self.ended > self.began else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verify step with drafts; 0 where there was none."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def add(self, batch: dict[str, Any]) -> None:
        """Count what an actor said of one batch."""
        for name in ("rows", "refused", "tokens", "drafts", "accepted"):
            setattr(self, name, getattr(self, name) + int(batch[name]))
        self.began = min(self.began, float(batch["began"]))
        self.ended = max(self.ended, float(batch["ended"]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        numbers = {k: v for k, v in asdict(self).items() if k not in ("began", "ended")}
        derived = ("tokens_per_second", "acceptance_length")
        return numbers | {name: getattr(self, name) for name in derived}


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
        for batch in _generate(settings, left):
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


def _generate(settings: BatchSettings, rows: Dataset) -> Iterator[dict[str, Any]]:
    """One row of counts for each batch, as they come."""
    import ray.data

    return iter(
        rows.repartition(target_num_rows_per_block=settings.batch)  # so that a task is a batch
        .map_batches(
            Generator,
            fn_constructor_args=(
                settings.engine(),
                {"temperature": settings.temperature, "max_tokens": settings.max_tokens},
                str(settings.out.absolute()),
                settings.form,
                settings.prompt_column,
            ),
            batch_size=settings.batch,
            compute=ray.data.ActorPoolStrategy(size=settings.engines),
            num_cpus=settings.num_cpus,
            num_gpus=settings.gpus,
            runtime_env={"env_vars": settings.environment()},
        )
        .iter_rows()
    )
