"""What an inspection found, as data: `Inspection.to_dict` is the schema of `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dflash.checkpoint.spec import DrafterSpec

SCHEMA = "vllm-dflash.inspect/2"
FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2
STATUS = {FITS: "fits", DOES_NOT_FIT: "does not fit", UNREADABLE: "unreadable"}


@dataclass(frozen=True)
class Fault:
    """A reason why the pair does not fit."""

    kind: str
    """`target`, `pair`, `parallel` (of ranks), `tensors` or `memory`."""
    message: str


@dataclass(frozen=True)
class TensorFacts:
    """What the headers of the drafter's checkpoint say."""

    files: list[str]
    parameters: int
    num_bytes: int
    """In the files."""
    dtypes: dict[str, int]
    """Tensors of each type."""
    own_embedding: bool
    own_head: bool


@dataclass(frozen=True)
class TargetFacts:
    """What vLLM makes of the target's config."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_model_len: int
    parameters: int | None
    """None where the headers were not checked."""
    num_bytes: int | None


@dataclass(frozen=True)
class Budget:
    """What a KV cache of so many bytes holds on each rank, as vLLM logs it at start."""

    num_bytes: int
    tokens: int
    max_concurrency: float
    """Requests of `max_model_len` tokens at a time."""
    longest_request: int
    """Tokens; the largest `--max-model-len` that vLLM starts with, up to the target's limit."""


@dataclass(frozen=True)
class CacheFacts:
    """The KV cache that target and drafter share, on each rank."""

    block_size: int
    """Tokens of a block."""
    drafter_bytes_per_token: int
    target_bytes_per_token: int
    sliding_target_layers: int
    """Layers of the target that look back through a window shorter than a request may be."""
    budget_source: str | None
    """`--kv-cache-memory`, `VLLM_CPU_KVCACHE_SPACE`, or None: `budgets` are examples."""
    budgets: list[Budget]


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes on each tensor-parallel rank."""

    platform: str
    tensor_parallel_size: int
    drafter_tensor_parallel_size: int
    """Ranks that the drafter's layers are split over; 1: each has them whole."""
    max_model_len: int
    drafter_weights: int
    """Parameters, and a copy of its K and V projections; what is the target's does not count."""
    cache: CacheFacts | None
    """None where the target's cache cannot be told; `not_checked` says why."""


@dataclass
class Inspection:
    """All of it. What could not be found out is None, and `error` or `not_checked` says why."""

    drafter_model: str
    target_model: str
    error: str | None = None
    """Why something could not be read; the verdict is `unreadable` then."""
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    drafter: DrafterSpec | None = None
    tensors: TensorFacts | None = None
    target: TargetFacts | None = None
    memory: MemoryFacts | None = None
    speculative_config: dict[str, Any] | None = None
    """What to paste, where the pair fits."""
    command: str | None = None

    @property
    def exit_code(self) -> int:
        """0: fits, 1: does not fit, 2: could not be read."""
        if self.error is not None:
            return UNREADABLE
        return DOES_NOT_FIT if self.faults else FITS

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; every key is there in every case."""
        status = {"status": STATUS[self.exit_code], "exit_code": self.exit_code}
        drafter = self.drafter and self.drafter.model_dump()
        return {"schema": SCHEMA, **status, **asdict(self), "drafter": drafter}
