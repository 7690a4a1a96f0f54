"""How many drafts of a step are verified if the device trims, and from what this is decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.planner_world import straight_costs
from vllm_dflash.engine.v2 import trimming as module
from vllm_dflash.engine.v2.exchange import Directions, HostCopy
from vllm_dflash.engine.v2.trimming import STEPS_TO_ARRIVE, DraftBudget, Sent
from vllm_dflash.planning import Floats
from vllm_dflash.planning.budget import MOST_SAMPLED, Load, RecentWorths
from vllm_dflash.planning.step import Learned
from vllm_dflash.planning.window import Window

K, SLOTS, LOGITS = 3, 6, 64
PLACES = {"new": 2, "undrafted": 3, "decodes": 4, "at its end": 5, "in its prompt": 0}
ROWS = {"decodes": 4, "undrafted": 1, "in its prompt": 60, "at its end": 2, "new": 4}
DRAFTS = {"new": [-1, -1, -1], "decodes": [7, 7, 7], "at its end": [7]}
COMPUTED = np.array([7, 8000, 49, 500, 100, 300], np.int32)
PROMPTS = np.array([200, 9000, 50, 450, 90, 250], np.int32)


def bare(chances: float | Floats = 0.5, *, fair: bool = False) -> Any:
    """A budget of six slots, with costs; `chances` are those that have arrived on the host,
    [6, 3]."""
    states = SimpleNamespace(
        max_num_reqs=SLOTS,
        req_id_to_index=PLACES,
        num_computed_tokens_np=COMPUTED,
        prefill_len=SimpleNamespace(np=PROMPTS),
    )
    whole: Any = SimpleNamespace(
        req_states=states,
        num_speculative_steps=K,
        num_bonus_tokens=1,
        _max_total_logits=LOGITS,
        _confidence_probs=torch.full((SLOTS, K), 0.5),
    )
    stream: Any = None
    budget = DraftBudget.instead_of(whole, K, stream, fair=fair)
    budget.costs = straight_costs()
    for step, sent in ((-2, chances), (-1, 9), (0, 9)):
        values = torch.from_numpy(np.full((SLOTS, K), sent, np.float32))
        budget._sent.append(Sent(step, False, HostCopy(values)))
    return budget


def decode(budget: Any, directions: Directions, chance: float = 0.5, *, rows: int = 4) -> int:
    """Run a step of one request whose new drafts have this chance; return how many are verified."""
    budget.begin_step(directions)
    found = budget.get_num_tokens({"decodes": rows}, DRAFTS) - rows + K
    batch: Any = SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([PLACES["decodes"]]))
    budget.record_confidences(torch.full((1, K), chance), batch)
    return found


def fresh_recent() -> RecentWorths:
    return RecentWorths(SLOTS, K)


def expected_of(recent: RecentWorths) -> list[float]:
    """Sampled chances of the request `decodes`."""
    return recent.sample(np.array([PLACES["decodes"]]), np.array([K]))[0].tolist()


def learned(factor: float) -> Learned:
    rates = np.zeros((K, 11))
    records = straight_costs().records.copy()
    records["verify"]["seconds"] *= factor
    return Learned(records, rates, rates)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the number was asked for; it is always 5."""
    seen: list[Any] = []

    def best(*what: Any, **_: Any) -> int:
        seen.append(what)
        return 5

    monkeypatch.setattr(module, "best_budget", best)
    return seen


@pytest.mark.parametrize("runs_block", [True, False])
def test_five_requests(asked: list[Any], runs_block: bool) -> None:
    """Among the inner requests, one has no drafts and one is in its prompt. One request is at its
    limit, and one is new, with placeholders. Slots are not batch rows, nor in their order."""
    random = np.random.default_rng(0)
    chances = random.random((SLOTS, K)).astype(np.float32)
    budget, recent = bare(chances), RecentWorths(SLOTS, K)
    budget.begin_step(Directions(runs_block, window=Window(100, 100, 0)))
    budget.add_request(PLACES["new"])
    assert budget.get_num_tokens(ROWS, DRAFTS) == 64 + 5
    assert budget._batch_budget == (
        {"decodes": 3, "undrafted": 0, "in its prompt": 0, "at its end": 1, "new": 3},
        {"decodes": 1, "undrafted": 1, "in its prompt": 60, "at its end": 1, "new": 1},
        5,
    )
    ((*what, scores, steps, most, min_verified),) = asked
    attended = float(sum(min(COMPUTED[slot], 100) for slot in PLACES.values()))
    assert what == [budget.costs, Load(4, 64, 949.0, 449 / 3, 5 * (1 + K) * runs_block, attended)]
    assert (most, min_verified) == (7, 0)
    known = np.array([4, 3, 5])  # for the others, the host has another request's chances, or none
    recent.add(known, chances[known])
    expected, expected_steps = recent.sample(np.array([4, 5, 2]), np.array([3, 1, 3]))
    assert steps == expected_steps
    np.testing.assert_array_equal(scores, expected)


def test_chances_of_a_step_are_pooled_once(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps may be planned anew before the next chances have arrived."""
    budget, added = bare(), []
    while len(budget._sent) > 1:
        budget._sent.pop()
    monkeypatch.setattr(RecentWorths, "add", lambda _, slots, chances: added.append(len(slots)))
    for _ in range(3):
        budget.begin_step(Directions(runs_block=False))
        budget.get_num_tokens(ROWS, DRAFTS)
    assert len(asked) == 3
    assert len(added) == 1


def test_no_more_than_there_is_room_for(asked: list[Any]) -> None:
    budget = bare()
    budget._max_total_logits = 5 + 6
    budget.get_num_tokens(ROWS, DRAFTS)
    assert asked[0][4] == 6


@pytest.mark.parametrize(
    ("rows", "drafts"),
    [({"in its prompt": 60}, {}), ({"decodes": 1, "at its end": 1}, {}), ({"new": 40}, {})],
)
def test_without_drafts_nobody_asks(
    asked: list[Any], rows: dict[str, int], drafts: dict[str, list[int]]
) -> None:
    budget = bare()
    assert budget.get_num_tokens(rows, drafts) == sum(rows.values())
    assert budget._batch_budget[2] == 0
    assert not asked


def test_it_may_be_nothing_and_a_probe_is_verified_a_step_later() -> None:
    """Drafts are never right here. A step's directions apply to the drafts that it makes."""
    budget = bare(0.0)
    found = [
        decode(budget, Directions(runs_block=True, min_verified=each), 0.0)
        for each in (0,) * 60 + (2, 0, 0)
    ]
    assert found[-3:] == [0, 2, 0]


def test_between_two_plans_a_budget_is_the_same_share_of_the_drafts() -> None:
    """Chances are then not sent to the host."""
    budget = bare()
    for chance in (0.0, 1.0):  # seen by the plan; the steps after it do not look
        planned = [decode(budget, Directions(runs_block=True), chance) for _ in range(60)]
        sent = len(budget._sent)
        repeat = Directions(runs_block=True, has_new_plan=False)
        repeated = [decode(budget, repeat, 1.0 - chance) for _ in range(8)]
        assert planned[-1] == K * chance
        assert repeated == [planned[-1]] * 8
        assert len(budget._sent) <= sent


def test_placeholders_have_no_chance_and_the_slots_past_is_forgotten() -> None:
    """vLLM would give them the best chances. Other slots do not change."""
    budget = bare()
    for _ in range(MOST_SAMPLED):
        budget.recent.add(np.arange(SLOTS), np.full((SLOTS, K), 0.1))
    budget.add_request(2)
    hopeless = [[0.5] * K, [0.5] * K, [0.0] * K, *[[0.5] * K] * 3]
    assert budget._confidence_probs.tolist() == hopeless
    first, of_another = (
        budget.recent.sample(np.array([slot]), np.array([1]))[0] for slot in (2, 3)
    )
    fresh = RecentWorths(SLOTS, K).sample(np.array([0]), np.array([1]))[0]
    assert first.tolist() == fresh.tolist() != of_another.tolist()


def test_chances_of_steps_without_a_block_are_not_those_of_blocks() -> None:
    """After them no draft is likely, unless a text predicts it. The host has the chances of three
    steps ago, and decides about the drafts of the last step."""
    budget = bare(0.0)
    is_known = []
    for runs_block in (False, True, True, True, True):
        decode(budget, Directions(runs_block), 0.0)
        is_known.append(expected_of(budget.recent) != expected_of(fresh_recent()))
        budget.recent = fresh_recent()
    # Known if both steps are alike: both ran a block, or neither, as before the first step.
    assert is_known == [True, True, False, False, True]


@pytest.mark.parametrize("fair", [False, True])
def test_the_users_objective_decides_the_budget_and_its_split(
    monkeypatch: pytest.MonkeyPatch, fair: bool
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(module, "best_budget", lambda *_, fair: told.append(fair) or 1)
    monkeypatch.setattr(module, "split", lambda *_, fair: told.append(fair))
    budget = bare(fair=fair)
    budget._cu_num_logits = budget.query_start_loc = None
    decode(budget, Directions(runs_block=True))
    budget._split(torch.zeros(1), torch.ones(2, 1), budget=1)
    assert told == [fair, fair]
    assert budget.recent._fair == fair


def test_chances_of_who_had_the_slot_before_and_of_prompts_are_not_the_requests() -> None:
    """The host's chances are two steps old. Those of a request's first drafts are there three steps
    after the last chunk of its prompt; the chunks before it had no drafts."""
    budget = bare(0.1)
    for _ in range(4):  # make all steps alike
        decode(budget, Directions(runs_block=True), 0.1)
    budget.recent = fresh_recent()
    budget.add_request(4)
    budget.req_states.prefill_len = SimpleNamespace(np=np.full(SLOTS, 48))
    found = []
    for computed in (0, 16, 32, 48, 52, 53):
        budget.req_states.num_computed_tokens_np = np.full(SLOTS, computed)
        decode(budget, Directions(runs_block=True), 0.1, rows=16 if computed < 48 else 4)
        found.append(expected_of(budget.recent) == expected_of(fresh_recent()))
    assert found == [True] * 5 + [False]


def test_a_prompt_makes_the_sample_of_those_that_decode_no_smaller(asked: list[Any]) -> None:
    """A prompt has no drafts that a step could sample."""
    budget = bare()
    for rows in ({"decodes": 4}, {"decodes": 4, "in its prompt": 60, "undrafted": 1}):
        budget.get_num_tokens(rows, DRAFTS)
    assert [steps for *_, steps, _, _ in asked] == [MOST_SAMPLED] * 2


def test_what_steps_cost_is_taken_from_the_scheduler() -> None:
    """Into the same memory. Without news, or before costs are known, nothing changes."""
    budget = bare()
    costs, budget.costs = budget.costs, None
    budget.begin_step(Directions(runs_block=True, learned=learned(2.0)))
    assert budget.costs is None
    budget.costs = costs
    budget.begin_step(Directions(runs_block=True))
    assert (costs.verify.seconds == straight_costs().verify.seconds).all()
    budget.begin_step(Directions(runs_block=True, learned=learned(2.0)))
    assert budget.costs is costs
    assert (costs.verify.seconds == 2.0 * straight_costs().verify.seconds).all()


def test_until_costs_are_known_all_drafts_are_verified() -> None:
    """vLLM then profiles nothing for tables that are not used, in batches whose blocks may have
    more rows than fit."""
    budget = bare()
    budget.costs = None
    assert budget.get_num_tokens(ROWS, DRAFTS) == sum(ROWS.values())
    assert [*budget.batches_to_profile([1, 2, 4])] == []
    budget.set_initial_cost_curves([])
    assert budget.get_num_tokens(ROWS, DRAFTS) == sum(ROWS.values())


def test_chances_that_nobody_asks_for_do_not_pile_up() -> None:
    """While no drafts are verified, vLLM asks for no budget."""
    budget = bare()
    batch: Any = SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([4]))
    for _ in range(50):
        budget.begin_step(Directions(runs_block=False))
        budget.record_confidences(torch.zeros(1, K), batch)
    assert len(budget._sent) <= STEPS_TO_ARRIVE + 1
