"""An inspection in tables and words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from vllm_dflash.tools.inspect.inspection import (
    CacheFacts,
    DrafterFacts,
    GraphFacts,
    GraphSet,
    Inspection,
    LayerFacts,
    MemoryFacts,
    TargetFacts,
    TensorFacts,
)
from vllm_dflash.tools.inspect.sizes import format_size
from vllm_dflash.tools.tables import Table

Rows = list[tuple[str, ...]]
REMEDIES = {
    "target": "Another drafter would not change that.",
    "pair": "Choose a drafter that was trained for this target.",
    "parallel": "Choose another --tensor-parallel-size.",
    "tensors": "Download the drafter again: its weights are not those its config.json implies.",
    "memory": "Choose another --max-model-len, --block-size or --kv-cache-memory.",
}
"""What to do about each kind of fault."""
MEASURED = "Graph capturing finished in ... secs, took ... GiB"
"""The line of vLLM's log with what graphs have taken."""


def make_tables(found: Inspection) -> list[Table]:
    """All that is known, in the order people ask."""
    tables = []
    if found.drafter is not None:
        tables.append(_drafter(found.drafter, found.tensors))
    if found.tensors is not None:
        tables.append(_tensors(found.tensors))
    if found.target is not None:
        tables.append(_target(found.target))
    if found.memory is not None:
        tables += _memory(found.memory)
    if found.graphs is not None:
        tables.append(_graphs(found.graphs))
    return tables


def make_notes(found: Inspection) -> list[str]:
    """What to take away: lines of text, the command last."""
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


def _drafter(facts: DrafterFacts, tensors: TensorFacts | None) -> Table:
    width = str(facts.hidden_size)
    if facts.target_hidden_size != facts.hidden_size:
        width += f", reads states of {facts.target_hidden_size}"
    rows: Rows = [
        ("model", facts.model),
        ("dialect", facts.dialect),
        ("resembles", facts.resembles),
        ("block size", f"{facts.block_size}: drafts up to {facts.max_draft_tokens} tokens"),
        ("mask token", str(facts.mask_token_id)),
        ("taps", f"outputs of target layers {', '.join(map(str, facts.taps))}"),
        ("hidden size", width),
        ("heads", f"{facts.heads} of {facts.head_dim}, {facts.kv_heads} for keys and values"),
        *((f"layers {numbers}", text) for numbers, text in layer_ranges(facts.layers)),
        ("vocabulary", _vocabulary(facts, tensors)),
    ]
    if (second := facts.dflash2) is not None:
        rows += [
            ("convolutions", f"over {second.conv_kernel_size} rows, around attention and MLP"),
            (
                "candidates",
                f"{second.selector_top_k} for each place, codes of {second.selector_rank} numbers",
            ),
        ]
    if facts.quantization is not None:
        rows.append(("quantised", f"{facts.quantization}, as vLLM's layers take it"))
    return _named("Drafter", rows)


def layer_ranges(layers: Sequence[LayerFacts]) -> list[tuple[str, str]]:
    """Neighbouring layers of a kind together: ("0-3", "window 2048, causal ...")."""
    ranges, first = [], 0
    for layer, same in groupby(layers):
        last = first + len(list(same)) - 1
        numbers = str(first) if first == last else f"{first}-{last}"
        reach = "whole context" if layer.window is None else f"window of {layer.window} tokens"
        block = "causal" if layer.causal else "not causal"
        ranges.append((numbers, f"{reach}, {block} inside the block"))
        first = last + 1
    return ranges


def _vocabulary(facts: DrafterFacts, tensors: TensorFacts | None) -> str:
    size = f"{facts.vocab_size} tokens"
    if facts.draft_vocab_size != facts.vocab_size:
        size += f", drafts from {facts.draft_vocab_size} of them"
    if tensors is None:
        return size
    own = [
        name
        for name, is_own in (("embedding", tensors.own_embedding), ("head", tensors.own_head))
        if is_own
    ]
    return f"{size}; {' and '.join(own) or 'no embedding or head'} of its own"


def _tensors(facts: TensorFacts) -> Table:
    kinds: dict[str, list[str]] = {}
    for name, tensor in facts.inventory.items():
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        pattern = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        kinds.setdefault(f"{pattern}\n{shape}\n{tensor['dtype']}", []).append(name)
    rows: Rows = [(*kind.split("\n"), str(len(names))) for kind, names in kinds.items()]
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts.dtypes.items())
    title = (
        f"Tensors: {facts.parameters:,} parameters, {format_size(facts.num_bytes)} in"
        f" {', '.join(facts.files)} ({dtypes}); {len(facts.missing)} missing,"
        f" {len(facts.surplus)} surplus, {len(facts.misshapen)} misshapen"
    )
    return Table(title, ("name", "shape", "type", "number"), rows, words=(0, 1, 2))


def _target(facts: TargetFacts) -> Table:
    rows: Rows = [
        ("model", facts.model),
        ("architecture", facts.architecture),
        ("layers", str(facts.num_layers)),
        ("hidden size", str(facts.hidden_size)),
        ("vocabulary", f"{facts.vocab_size} tokens"),
        ("runs in", f"{facts.dtype}, up to {facts.max_model_len} tokens a request"),
    ]
    if facts.parameters is not None and facts.num_bytes is not None:
        rows.append(
            ("tensors", f"{facts.parameters:,} parameters, {format_size(facts.num_bytes)} in files")
        )
    return _named("Target", rows)


def _memory(facts: MemoryFacts) -> list[Table]:
    size = facts.tensor_parallel_size
    ranks = f" on each of {size} ranks" if size > 1 else ""
    rows: Rows = [
        ("drafter's weights", f"{format_size(facts.drafter_weights)} in {facts.dtype}"),
        (
            "stacked K and V projections",
            f"{format_size(facts.drafter_context_projection)}, a copy for the context",
        ),
    ]
    if size > 1:
        is_split = facts.drafter_tensor_parallel_size > 1
        layers = "split over the ranks" if is_split else "whole on every rank: do not divide"
        rows.insert(0, ("drafter's layers", layers))
    if facts.waiting_context:
        rows.append(("waiting context", f"up to {format_size(facts.waiting_context)}"))
    title = f"Memory{ranks} (platform {facts.platform})"
    if facts.cache is None:
        return [_named(title, rows)]
    cache = facts.cache
    rows += [
        ("drafter's K/V of a token", format_size(cache.drafter_bytes_per_token)),
        ("target's K/V of a token", format_size(cache.target_bytes_per_token)),
        ("drafter's share of the KV cache", f"{cache.drafter_share:.1%}"),
        ("blocks", f"{cache.block_size} tokens, {format_size(cache.bytes_per_block)}"),
        ("cache groups (without DFlash)", _both("{}", cache.groups, cache.groups_without)),
    ]
    return [_named(title, rows), _budgets(cache, facts.max_model_len)]


def _budgets(cache: CacheFacts, max_model_len: int) -> Table:
    rows: Rows = [
        (
            format_size(budget.num_bytes),
            _both("{:,}", budget.tokens, budget.tokens_without),
            _both("{:.2f}", budget.max_concurrency, budget.max_concurrency_without),
            _both("{:,}", budget.longest_request, budget.longest_request_without),
        )
        for budget in cache.budgets
    ]
    columns = (
        "KV cache",
        "tokens",
        f"requests of {max_model_len:,} at a time",
        "longest --max-model-len",
    )
    given = f", {cache.budget_source}" if cache.budget_source else ", examples"
    return Table(f"What it holds (without DFlash){given}", columns, rows)


def _graphs(facts: GraphFacts) -> Table:
    rows: Rows = [("drafts trimmed on the device", f"no: {facts.untrimmed}")]
    if facts.untrimmed is None:
        rows = [("drafts trimmed on the device", "yes")]
    rows += [_graph_set(found) for found in facts.captured]
    staged = f", {format_size(facts.staged_taps)} of it taps for graphs" * bool(facts.staged_taps)
    return _named(
        f"CUDA graphs (mode {facts.mode}; up to {facts.max_num_seqs:,} requests and"
        f" {facts.max_num_batched_tokens:,} tokens a step)",
        [
            *rows,
            ("drafter's buffers", format_size(facts.drafter_buffers) + staged),
            ("target's outputs", format_size(facts.target_outputs)),
            (
                "graphs themselves",
                f"{format_size(facts.least_reserved)} set aside, or more; vLLM measures them, and"
                f' logs "{MEASURED}"',
            ),
        ],
    )


def _graph_set(found: GraphSet) -> tuple[str, str]:
    """What the graphs are for, how many, and for which sizes."""
    names = {
        "uniform": f"drafts of {(found.rows or 1) - 1}",
        "ragged": f"drafts of 0 to {(found.rows or 1) - 1}",
        "any": "any batch",
        "pieces": "any batch, in pieces",
    }
    name = f"blocks of {found.rows}" if found.model == "drafter" else names[found.kind]
    unit = "requests" if found.kind == "uniform" else "tokens"
    return f"{found.model}, {name}", f"{len(found.sizes)}: {spans(found.sizes)} {unit}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "1, 2, 4, 8 to 64 by 8"."""
    parts, rest = [], list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        same = 1
        while same < len(rest) and rest[same] - rest[same - 1] == step:
            same += 1
        if same < 4:
            parts.append(str(rest.pop(0)))
            continue
        parts.append(f"{rest[0]} to {rest[same - 1]}" + f" by {step}" * (step > 1))
        del rest[:same]
    return ", ".join(parts)


def _named(title: str, rows: Rows) -> Table:
    """Names and what they are."""
    return Table(title, (), rows, words=(0, 1))


def _both(form: str, drafting: float, plain: float | None) -> str:
    return f"{form.format(drafting)} ({'unknown' if plain is None else form.format(plain)})"
