"""What `propose` does to each request, on a real paged cache; the design's hazards by name."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cached_drafter import CACHE_BLOCK, Harness, Row
from support.drafter_harness import DrafterHarness
from support.engines import USES_V2
from support.pairs import Pair, dflash2_config, lilicorr_config, make_pair
from support.planner_world import profiled_costs
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord

on_both_runners = pytest.mark.usefixtures("runner")


@pytest.fixture
def harness(pair: Pair) -> Harness:
    return DrafterHarness(pair)


def features(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, 2 * 64, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": dflash2_config(),
    "lilicorr": lilicorr_config(),
}


@on_both_runners
@pytest.mark.parametrize("kind", KINDS)
def test_hazard_6_batched_drafting_equals_drafting_each_request_alone(
    tmp_path: Path, kind: str
) -> None:
    """Some have verified drafts in the same step. One is in its prompt, one is at its end, one has
    room for a short block, and rows are not in the order of their slots."""
    pair = make_pair(tmp_path, **KINDS[kind])
    lengths = {5: 1, 2: 33, 0: 20, 7: 64, 3: 254, 6: 251, 1: 7}
    rows = [Row(slot, features(count, slot), bonus=20 + slot) for slot, count in lengths.items()]
    rows[1].num_rejected, rows[3].num_rejected, rows[2].in_prompt = 3, 7, True
    harness, alone = DrafterHarness(pair), DrafterHarness(pair)
    together = harness.step(rows)
    assert [len(drafts) for drafts in together] == [7, 7, 0, 7, 0, 3, 7]
    for number in (0, 1, 3, 5, 6):
        assert DrafterHarness(pair).step([rows[number]]) == [together[number]]
    alone.step([rows[2]])
    rest_of_its_prompt = [Row(0, features(4, 9))]
    assert harness.step(rest_of_its_prompt) == alone.step(rest_of_its_prompt)


@on_both_runners
def test_a_request_near_the_context_limit_affects_only_itself(pair: Pair) -> None:
    limit = 256
    contexts = {"far": 50, "at 5": limit - 7, "at 1": limit - 3, "at 0": limit - 2}
    rows = [Row(i, features(n, i), bonus=9) for i, n in enumerate(contexts.values())]
    drafts = DrafterHarness(pair).step(rows)
    assert [len(d) for d in drafts] == [7, 5, 1, 0]
    # The far request drafts exactly what it would without the long ones.
    assert DrafterHarness(pair).step(rows[:1]) == drafts[:1]


@on_both_runners
def test_hazard_2_a_prompt_split_anywhere_drafts_the_same(pair: Pair) -> None:
    """Chunks that sample nothing must store their context, whatever their size."""
    whole = features(40, 0)
    harness = DrafterHarness(pair)
    expected = harness.step([Row(0, whole, bonus=3)])
    for split in range(1, 40):
        harness.lengths[0] = 0
        blocks = harness.blocks[0].long()
        for cache in harness.caches:
            cache[blocks] = 0.0  # nothing may be left of the last round
        assert harness.step([Row(0, whole[:split], in_prompt=True)]) == [[]]
        assert harness.step([Row(0, whole[split:], bonus=3)]) == expected, split


@on_both_runners
def test_context_is_stored_for_requests_that_draft_nothing(pair: Pair) -> None:
    """Even at the limit, in the prompt, or if blocks have no width."""
    whole = features(40, 0)
    expected = DrafterHarness(pair).step([Row(0, whole, bonus=3)])
    harness = DrafterHarness(pair)
    assert harness.step([Row(0, whole[:13], in_prompt=True)]) == [[]]
    assert harness.step([Row(0, whole[13:30], bonus=1)], num_speculative_tokens=0) == [[]]
    harness.max_tokens = harness.lengths[0] + 5 + 2  # ends here: no draft could be used
    company = Row(1, features(3, 1), in_prompt=True)  # in a changed batch, ends are read again
    assert harness.step([Row(0, whole[30:35], bonus=2), company]) == [[], []]
    if not USES_V2:  # V2's scheduler knows which requests can use drafts
        assert harness.proposer.statistics.drafted_steps == 0
    harness.max_tokens = 10_000
    assert harness.step([Row(0, whole[35:], bonus=3)]) == expected


class Told(Planner):
    """Drafts these requests, and verifies so many drafts of each, from a block or a text."""

    def __init__(self, drafted: list[bool], lengths: list[int], from_text: list[bool]) -> None:
        super().__init__(7, 1)
        self.drafted, self.chosen, self.from_text = drafted, lengths, from_text

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        plan = super().plan(ids, context_lens, max_drafts)
        return replace(plan, drafted=np.array(self.drafted))

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        return np.array(self.chosen), np.array(self.from_text)


def planned_harness(pair: Pair, policy: Told) -> Harness:
    harness = DrafterHarness(pair)
    harness.proposer.start_planning(profiled_costs())
    harness.proposer.host.planner = policy
    return harness


def test_who_is_drafted_gets_its_own_context_and_what_was_chosen(pair: Pair) -> None:
    """The second of four requests is drafted, and two of its drafts are to be verified. Its context
    is the longest, and the third request is in its prompt."""
    lengths = (20, 45, 22, 7)
    rows = [Row(number, features(count, number)) for number, count in enumerate(lengths)]
    rows[2].in_prompt = True
    expected = DrafterHarness(pair).step([rows[1]])[0]
    policy = Told([False, True, False, False], [0, 2, 0, 0], [False] * 4)
    harness = planned_harness(pair, policy)
    assert harness.step(rows) == [[], expected[:2], [], []]


@pytest.mark.parametrize(("room", "length"), [(99, 32), (5, 5), (0, 0), (-1, 0)])
def test_free_drafts_let_nobody_wait(pair: Pair, room: int, length: int) -> None:
    """Each of two requests may use half of a step's rows, including a block's and its own two."""
    harness = planned_harness(pair, Told([True] * 2, [0] * 2, [False] * 2))
    budget = 2 * (2 + harness.width + room) + 1
    harness.config.scheduler_config.max_num_batched_tokens = budget
    harness.texts[0, :5] = [11, 12, 13, 14, 11]
    harness.step([Row(0, features(5, 0), bonus=12), Row(1, features(5, 1))])
    predicted = harness.proposer.host._last.predicted
    assert (predicted.lengths.tolist() if predicted else [0, 0]) == [length, 0]


def test_texts_go_on_where_the_drafters_length_ends(pair: Pair) -> None:
    """They go up to the target's limit, after which nothing can be accepted."""
    policy = Told([True, False, False], [4, 3, 0], [True, True, True])
    harness = planned_harness(pair, policy)
    harness.proposer.draft_model_config.hf_config.dflash_config["max_model_len"] = 96
    lengths = (100, 256 - 5, 256 - 2)
    for number, length in enumerate(lengths):
        harness.texts[number, :4] = [11, 12, 13, 14]
        harness.texts[number, length - 1] = 11
    rows = [Row(n, features(length, n), bonus=12) for n, length in enumerate(lengths)]
    drafts = harness.step(rows)
    assert [len(one) for one in drafts] == [4, 3, 0]
    step = harness.proposer.host._last
    assert step.predicted is not None
    assert step.predicted.lengths.tolist() == [32, 3, 0]
    assert step.max_drafts.tolist() == [0, 0, 0]


def test_requests_that_limit_their_drafts(pair: Pair) -> None:
    """The drafts of blocks, as wide as they can be, and those of texts."""
    rows = [Row(number, features(9, number), bonus=12) for number in range(4)]
    blocks = DrafterHarness(pair)
    blocks.proposer._own_limits.update({"0": 0, "1": 2, "3": 99})
    full = DrafterHarness(pair).step(rows)
    assert [len(drafts) for drafts in full] == [7] * 4
    found = blocks.step(rows)
    assert [len(drafts) for drafts in found] == [0, 2, 7, 7]  # a narrow block's may be others
    assert found[2:] == full[2:]
    texts = planned_harness(pair, Told([True] * 4, [9] * 4, [True] * 4))
    texts.proposer._own_limits.update({"0": 0, "1": 2, "3": 9})
    for row in rows:
        texts.texts[row.request, :4] = [11, 12, 13, 14]
        texts.texts[row.request, 8] = 11
    assert [len(drafts) for drafts in texts.step(rows)] == [0, 2, 9, 9]
    predicted = texts.proposer.host._last.predicted
    assert predicted.lengths.tolist() == [0, 2, 32, 9]


def test_drafts_alone_never_reach_min_tokens(pair: Pair) -> None:
    """Neither a block's nor a text's: with fewer than 13 tokens, a request gets a token of its own
    after its drafts."""
    lengths = (5, 9, 11, 12)
    rows = [Row(n, features(length, n), bonus=12) for n, length in enumerate(lengths)]
    blocks = DrafterHarness(pair)
    texts = planned_harness(pair, Told([True] * 4, [9] * 4, [True] * 4))
    blocks.min_tokens = texts.min_tokens = 13
    assert [len(drafts) for drafts in blocks.step(rows)] == [6, 2, 0, 7]
    for row, length in zip(rows, lengths, strict=True):
        texts.texts[row.request, :4] = [11, 12, 13, 14]
        texts.texts[row.request, length - 1] = 11
    assert [len(drafts) for drafts in texts.step(rows)] == [6, 2, 0, 9]


@on_both_runners
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "in company"])
def test_hazard_3_rejected_rows_must_not_be_stored(pair: Pair, others: int) -> None:
    """The slots of rejected rows do not change."""
    harness = DrafterHarness(pair)
    harness.allocate(0, 64)
    rows = [Row(0, features(25, 1), num_rejected=5)]
    rows += [Row(number, features(4, number)) for number in range(1, 1 + others)]
    harness.step(rows, num_speculative_tokens=0)
    assert harness.lengths[0] == 20
    block = int(harness.blocks[0, 0])
    per_token = 2 * pair.spec.num_kv_heads * pair.spec.head_dim  # numbers of one key and value
    assert [int((cache[block] != 0).sum()) for cache in harness.caches] == [20 * per_token] * 2
    dirty, clean = DrafterHarness(pair), DrafterHarness(pair)
    kept, tail, after = features(23, 0), torch.full((5, 128), 1e9), features(2, 2)
    dirty.step([Row(0, torch.cat([kept, tail]), num_rejected=5)])
    clean.step([Row(0, kept)])
    assert dirty.step([Row(0, after)]) == clean.step([Row(0, after)])


@on_both_runners
def test_hazard_5_unwritten_cache_pages_may_hold_nan(pair: Pair) -> None:
    """Blocks that were never allocated stay NaN in this harness, and are not read."""
    harness = DrafterHarness(pair)
    drafts = harness.step([Row(0, features(CACHE_BLOCK * 2 - 3, 0))])
    assert harness.nan_drafts() == 0
    assert len(drafts[0]) == 7
    untouched = harness.blocks[1].long()
    assert all(cache[untouched].isnan().all() for cache in harness.caches)


@on_both_runners
def test_hazard_6_slot_reuse_after_an_abort_sees_nothing_of_the_old(pair: Pair) -> None:
    """Another request gets the row and the cache blocks of an aborted one."""
    harness = DrafterHarness(pair)
    harness.step([Row(0, features(90, 0))])
    harness.lengths[0] = 0
    row = Row(0, features(21, 5), bonus=4)
    assert harness.step([row]) == DrafterHarness(pair).step([row])


@on_both_runners
def test_hazard_4_padding_rows_write_nothing(harness: Harness) -> None:
    """Both runners give such rows the slot -1."""
    slots = torch.full((6,), -1)
    harness.proposer.model.context.store(features(6, 0), torch.arange(6), slots)
    assert all(cache.isnan().all() for cache in harness.caches)


@on_both_runners
def test_nan_logits_never_become_drafts(harness: Harness) -> None:
    bad = features(8, 1)
    bad[3] = float("nan")
    drafts = harness.step([Row(0, features(8, 0)), Row(1, bad), Row(2, features(8, 2))])
    assert [len(d) for d in drafts] == [7, 0, 7]
    assert harness.nan_drafts() == 7


def test_a_steps_rows_are_those_of_the_target(harness: Harness) -> None:
    """Prompt tokens and drafts included, because steps are told apart and learned from by rows."""
    seen: list[StepRecord] = []
    harness.proposer.host.end = seen.append
    harness.step([Row(0, features(9, 0)), Row(1, features(4, 1), num_rejected=2)])
    harness.step([Row(0, features(1, 2)), Row(1, features(1, 3))])
    assert [step.rows for step in seen] == [13, 2]
    assert [step.num_requests for step in seen] == [2, 2]


def test_full_layers_of_a_drafter_see_all_of_what_its_target_forgets(
    pair: Pair, tmp_path: Path
) -> None:
    """vLLM takes a window that all layers of a target have as the whole cache's."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    layer_types = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": layer_types}
    (target / "config.json").write_text(json.dumps(config))
    sliding = DrafterHarness(Pair(target, pair.drafter, pair.spec))
    assert sliding.config.cache_config.sliding_window == 8
    row = Row(0, features(60, 0), bonus=3)
    assert sliding.step([row]) == DrafterHarness(pair).step([row])


def test_a_cache_type_of_the_drafters_own_is_not_the_targets(harness: Harness) -> None:
    proposer = harness.proposer
    (whole,) = proposer.draft_attn_groups
    attentions = proposer.model.context.attentions
    for attention in attentions:
        attention.attn.kv_cache_dtype = "bfloat16"
    assert harness.config.cache_config.cache_dtype == "auto"
    groups = split_by_kind(whole, attentions, harness.config, torch.device("cpu"), CACHE_BLOCK)
    types = {group.get_metadata_builder().kv_cache_dtype for group in groups}
    assert types == {"bfloat16"}
    assert harness.config.cache_config.cache_dtype == "auto"


def test_layers_that_see_later_rows_and_those_that_do_not_have_groups_of_their_own(
    harness: Harness,
) -> None:
    proposer = harness.proposer
    (whole,) = proposer.draft_attn_groups
    attentions = proposer.model.context.attentions
    for number, attention in enumerate(attentions):
        attention.causal = number > 0
    groups = split_by_kind(whole, attentions, harness.config, torch.device("cpu"), CACHE_BLOCK)
    names = [attention.attn.layer_name for attention in attentions]
    assert len(names) > 1
    found = {group.causal: group.layer_names for group in groups}
    assert found == {False: names[:1], True: names[1:]}


@pytest.mark.parametrize(
    ("connector", "groups", "waits"), [(None, 1, True), ("one", 1, False), (None, 2, False)]
)
def test_context_waits_only_where_nobody_else_needs_the_cache(
    pair: Pair, connector: str | None, groups: int, waits: bool
) -> None:
    proposer = DrafterHarness(pair).proposer
    proposer.vllm_config.kv_transfer_config = connector
    proposer.num_cache_groups = groups
    proposer.start_planning(profiled_costs())
    assert (proposer.host.backlog is not None) == waits
