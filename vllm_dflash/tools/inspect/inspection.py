"""What an inspection found, as data: `Inspection.to_dict` is the schema of `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_dflash.checkpoint.spec import DFlash2

SCHEMA = "vllm-dflash.inspect/1"
FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2
STATUS = {FITS: "fits", DOES_NOT_FIT: "does not fit", UNREADABLE: "unreadable"}


@dataclass(frozen=True)
class Fault:
    """A reason why the pair does not fit."""

    kind: str
    """`pair`, `parallel` (of ranks), `tensors` or `memory`."""
    message: str


@dataclass(frozen=True)
class LayerFacts:
    """Attention of one layer of the drafter."""

    window: int | None
    """Tokens it looks back; None: all of them."""
    causal: bool
    """Inside the block."""


@dataclass(frozen=True)
class DrafterFacts:
    """What the drafter's config says."""

    model: str
    dialect: str
    resembles: str
    block_size: int
    max_draft_tokens: int
    mask_token_id: int
    taps: list[int]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_target_layers: int | None
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    attention_sinks: bool
    dflash2: DFlash2 | None
    quantization: str | None
    layers: list[LayerFacts]


@dataclass(frozen=True)
class TensorFacts:
    """What the headers of a checkpoint say."""

    files: list[str]
    parameters: int
    num_bytes: int
    """In the files."""
    dtypes: dict[str, int]
    """Tensors of each type."""
    inventory: dict[str, dict[str, Any]]
    """`shape` and `dtype` of each tensor, by name."""
    missing: dict[str, list[int]]
    surplus: dict[str, list[int]]
    misshapen: dict[str, dict[str, list[int]]]
    """`found` and `expected` shape."""
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
    """What a KV cache of so many bytes holds, on each rank, with DFlash and without."""

    num_bytes: int
    tokens: int
    """As vLLM logs it at start."""
    max_concurrency: float
    """Requests of `max_model_len` tokens at a time."""
    longest_request: int
    """Tokens; the largest `--max-model-len` that fits, up to the target's limit."""
    holds_one_request: bool
    """Of `max_model_len`; vLLM does not start otherwise."""
    tokens_without: int | None
    """None where vLLM makes no cache of the target alone."""
    max_concurrency_without: float | None
    longest_request_without: int | None


@dataclass(frozen=True)
class CacheFacts:
    """The KV cache that target and drafter share, on each rank."""

    block_size: int
    """Tokens of a block."""
    groups: int
    """Groups of layers with a block table each, as vLLM's cache manager makes them."""
    groups_without: int | None
    """The same without a drafter."""
    drafter_bytes_per_token: int
    target_bytes_per_token: int
    bytes_per_block: int
    """What a block takes of the pool."""
    drafter_share: float
    """Part of the pool, 0 to 1, that the drafter's layers take."""
    sliding_target_layers: int
    """Layers of the target that look back through a window only."""
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
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    drafter_weights: int
    """The draft model's parameters; what it shares with the target does not count."""
    drafter_context_projection: int
    """A stacked copy of its K and V projections."""
    waiting_context: int
    """At most: target states kept back until their request is drafted. V1 runner, adaptive."""
    cache: CacheFacts | None
    """None where the target's cache cannot be told; `not_checked` says why."""


@dataclass(frozen=True)
class GraphSet:
    """CUDA graphs of one kind, for batches of several sizes."""

    model: str
    """`target` or `drafter`."""
    kind: str
    """`uniform`: each request has so many rows. `ragged`: up to so many. `any`: all batches.
    `pieces`: all batches, attention runs between the graphs."""
    rows: int | None
    """Of a request: 1 and its drafts, or the drafter's block. None: of no account."""
    sizes: list[int]
    """What each graph is for at most: requests where `uniform`, rows of all requests elsewhere."""


@dataclass(frozen=True)
class GraphFacts:
    """What vLLM captures at start, with DFlash and on CUDA, and bytes on each rank."""

    mode: str
    """vLLM's `cudagraph_mode`, of the target."""
    max_num_seqs: int
    max_num_batched_tokens: int
    untrimmed: str | None
    """Why drafts are not trimmed on the device; None: they are."""
    captured: list[GraphSet]
    drafter_buffers: int
    """What the speculator keeps beside weights and cache, `staged_taps` among it."""
    staged_taps: int
    """The target's states as the drafter's graphs read them; 0 before vLLM 0.33."""
    target_outputs: int
    """What the target's graphs write: last hidden states and taps of the largest."""
    least_reserved: int
    """vLLM takes no less of the KV cache's memory for the target's graphs, unless told its size."""


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
    drafter: DrafterFacts | None = None
    tensors: TensorFacts | None = None
    target: TargetFacts | None = None
    memory: MemoryFacts | None = None
    graphs: GraphFacts | None = None
    """None where the pair does not fit, where it cannot be told, and on CPUs, which have none."""
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
        return {"schema": SCHEMA, **status, **asdict(self)}
