"""The result of an inspection, as data (`to_dict` defines the schema of `--json`) and tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from pydantic import ByteSize

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.tools.tables import Table

SCHEMA = "vllm-dflash.inspect/3"
FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2
STATUS = {FITS: "fits", DOES_NOT_FIT: "does not fit", UNREADABLE: "unreadable"}
Rows = list[tuple[str, ...]]
REMEDIES = {
    "target": "Another drafter would not change that.",
    "pair": "Choose a drafter that was trained for this target.",
    "parallel": "Choose another --tensor-parallel-size.",
    "tensors": "Download the drafter again: its weights are not those its config.json implies.",
}
"""What to do about each kind of fault."""


@dataclass(frozen=True)
class Fault:
    """A reason why the pair does not fit."""

    kind: str
    """`target`, `pair`, `parallel` (number of ranks) or `tensors`."""
    message: str


@dataclass(frozen=True)
class TensorFacts:
    """Facts from the headers of the drafter's checkpoint."""

    files: list[str]
    parameters: int
    num_bytes: int
    """Bytes in the files."""
    dtypes: dict[str, int]
    """Number of tensors of each dtype."""
    own_embedding: bool
    own_head: bool


@dataclass(frozen=True)
class TargetFacts:
    """Facts about the target, from vLLM's config of it."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_model_len: int


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes on each tensor-parallel rank."""

    platform: str
    tensor_parallel_size: int
    drafter_tensor_parallel_size: int
    """Ranks that the drafter's layers are split over; 1 if each rank has all of them."""
    drafter_weights: int
    """The drafter's own parameters, plus a copy of its K and V projections."""
    drafter_cache_per_token: int | None
    """Keys and values of its layers; None if their size is unknown: `not_checked` says why."""


@dataclass
class Inspection:
    """The whole result. What is unknown is None; `error` or `not_checked` says why."""

    drafter_model: str
    target_model: str
    error: str | None = None
    """Why something could not be read; the verdict is then `unreadable`."""
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    drafter: DrafterSpec | None = None
    tensors: TensorFacts | None = None
    target: TargetFacts | None = None
    memory: MemoryFacts | None = None
    speculative_config: dict[str, Any] | None = None
    """The value of `--speculative-config`, if the pair fits."""
    command: str | None = None

    @property
    def exit_code(self) -> int:
        """0: fits, 1: does not fit, 2: could not be read."""
        if self.error is not None:
            return UNREADABLE
        return DOES_NOT_FIT if self.faults else FITS

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; every key is always present."""
        status = {"status": STATUS[self.exit_code], "exit_code": self.exit_code}
        drafter = self.drafter and self.drafter.model_dump()
        return {"schema": SCHEMA, **status, **asdict(self), "drafter": drafter}


def make_tables(found: Inspection) -> list[Table]:
    """Make the tables of all that is known."""
    named: dict[str, Rows] = {}
    if found.drafter is not None:
        named["Drafter"] = _drafter(found.drafter, found.tensors)
    if (target := found.target) is not None:
        named["Target"] = [
            ("model", f"{target.model} ({target.architecture})"),
            ("layers", f"{target.num_layers}, hidden size {target.hidden_size}"),
            ("vocabulary", f"{target.vocab_size} tokens"),
            ("runs in", f"{target.dtype}, up to {target.max_model_len} tokens a request"),
        ]
    if (memory := found.memory) is not None:
        rows: Rows = []
        ranks = ""
        if (size := memory.tensor_parallel_size) > 1:
            ranks = f" on each of {size} ranks"
            is_split = memory.drafter_tensor_parallel_size > 1
            whole = "whole on every rank: they do not divide"
            rows.append(("drafter's layers", "split over the ranks" if is_split else whole))
        rows.append(("drafter's weights", _size(memory.drafter_weights)))
        if memory.drafter_cache_per_token is not None:
            rows.append(("drafter's K/V per token", _size(memory.drafter_cache_per_token)))
        named[f"Memory{ranks} (platform {memory.platform})"] = rows
    return [Table(title, (), rows, words=(0, 1)) for title, rows in named.items()]


def make_notes(found: Inspection) -> list[str]:
    """Return the lines of text after the tables; if the pair fits, the last is the command."""
    lines = [f"warning: {text}" for text in found.warnings]
    lines += [f"not checked: {text}" for text in found.not_checked]
    if found.error is not None:
        return [*lines, f"Cannot be read: {found.error}"]
    if found.faults:
        reasons = [f"  - {fault.message}" for fault in found.faults]
        lines += [f"Does not fit {found.target_model}:", *reasons]
        lines += [REMEDIES[kind] for kind in dict.fromkeys(fault.kind for fault in found.faults)]
        return lines
    return [*lines, f"Fits {found.target_model}. Use it with:", found.command or ""]


def _drafter(spec: DrafterSpec, tensors: TensorFacts | None) -> Rows:
    vocabulary = f"{spec.vocab_size} tokens"
    if spec.draft_vocab_size != spec.vocab_size:
        vocabulary += f", drafts from {spec.draft_vocab_size} of them"
    if tensors is not None:
        own = ["embedding"] * tensors.own_embedding + ["head"] * tensors.own_head
        vocabulary += f"; {' and '.join(own) or 'no embedding or head'} of its own"
    rows: Rows = [
        ("model", f"{spec.model} (dialect {spec.dialect})"),
        ("block size", f"{spec.block_size}: drafts up to {spec.max_draft_tokens} tokens"),
        ("mask token", str(spec.mask_token_id)),
        ("taps", f"outputs of target layers {', '.join(map(str, spec.taps))}"),
        ("hidden size", f"{spec.hidden_size}, reads states of {spec.target_hidden_size}"),
        ("heads", f"{spec.num_heads} of {spec.head_dim}, {spec.num_kv_heads} for keys and values"),
        *layer_ranges(spec),
        ("vocabulary", vocabulary),
    ]
    if spec.num_candidates is not None:
        kind = "DFlash 2" if spec.lilicorr is None else "LiLiCorr"
        rows.append(("candidates", f"{spec.num_candidates} per position ({kind})"))
    if spec.quantization is not None:
        rows.append(("quantised", f"{spec.quantization}, run by vLLM's quantised layers"))
    if tensors is not None:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in tensors.dtypes.items())
        stored = f"{tensors.parameters:,} parameters, {_size(tensors.num_bytes)}"
        rows.append(("tensors", f"{stored} in {', '.join(tensors.files)} ({dtypes})"))
    return rows


def layer_ranges(spec: DrafterSpec) -> Rows:
    """Return a row per range of equal layers: ("layers 0-3", "window of 2048 tokens, ...")."""
    ranges: Rows = []
    first = 0
    for (window, causal), same in groupby(zip(spec.windows, spec.causal, strict=True)):
        last = first + len(list(same)) - 1
        numbers = str(first) if first == last else f"{first}-{last}"
        reach = "whole context" if window is None else f"window of {window} tokens"
        block = "causal" if causal else "not causal"
        ranges.append((f"layers {numbers}", f"{reach}, {block} inside the block"))
        first = last + 1
    return ranges


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable(separator=" ")
