"""Which drafts to verify, against a search through every possibility."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Bools, Floats
from vllm_dflash.planning.candidates import Candidates, select

# Few different values, so that ties are common.
rates = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
chains = st.lists(st.lists(rates, min_size=3, max_size=3), min_size=1, max_size=3)
steps = st.lists(st.floats(0, 1), min_size=9, max_size=9)
prices = st.floats(0, 5)


@st.composite
def forests(draw: st.DrawFn) -> Candidates:
    """Up to eight nodes, each the child of an earlier one or of the bonus token."""
    count = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    survival: list[float] = []
    for parent in parents:
        survival.append(draw(rates) * (1.0 if parent < 0 else survival[parent]))
    return Candidates(np.zeros(count, int), np.array(parents, int), np.array(survival))


def worth(chosen: Bools, candidates: Candidates, seconds: Floats, price: float) -> float:
    return float(candidates.survival[chosen].sum() - price * seconds[chosen.sum()])


def is_closed(chosen: Bools, candidates: Candidates) -> bool:
    """Whether every chosen token's parent is chosen too."""
    parents = candidates.parent[chosen]
    return bool(chosen[parents[parents >= 0]].all())


@given(forests(), steps, prices)
def test_selection_is_the_best_of_all_closed_sets(
    candidates: Candidates, increments: list[float], price: float
) -> None:
    count = len(candidates.survival)
    seconds = np.concatenate([[0.0], np.cumsum(increments)])[: count + 1]
    chosen = select(candidates, seconds, price)
    assert is_closed(chosen, candidates)
    sets = (np.array(bits, dtype=bool) for bits in product([False, True], repeat=count))
    best = max(worth(one, candidates, seconds, price) for one in sets if is_closed(one, candidates))
    assert worth(chosen, candidates, seconds, price) >= best - 1e-9


@given(chains, st.lists(st.integers(0, 3), min_size=3, max_size=3), steps, prices)
def test_chains_are_cut_where_it_is_best(
    conditional: list[list[float]], limits: list[int], increments: list[float], price: float
) -> None:
    """The lengths that follow from the selection, against every combination of lengths."""
    survival = np.cumprod(np.array(conditional), axis=1)
    limit = np.array(limits[: len(survival)])
    candidates = Candidates.chains(survival, limit)
    count = len(candidates.survival)
    assert count == limit.sum()
    seconds = np.concatenate([[0.0], np.cumsum(increments)])[: count + 1]
    chosen = select(candidates, seconds, price)
    lengths = np.bincount(candidates.request[chosen], minlength=len(survival))

    def value(combination: tuple[int, ...]) -> float:
        gain = sum(survival[row, :length].sum() for row, length in enumerate(combination))
        return float(gain - price * seconds[sum(combination)])

    best = max(value(lengths) for lengths in product(*(range(n + 1) for n in limit)))
    assert value(tuple(lengths)) >= best - 1e-9


@given(chains, steps)
def test_the_best_rate_is_its_own_price(
    conditional: list[list[float]], increments: list[float]
) -> None:
    """Priced at the best tokens per second to be had, the selection attains it (Dinkelbach)."""
    survival = np.cumprod(np.array(conditional), axis=1)
    requests, width = survival.shape
    candidates = Candidates.chains(survival, np.full(requests, width))
    seconds = 0.1 + np.concatenate([[0.0], np.cumsum(increments)])[: survival.size + 1]
    best = max(
        (requests + sum(survival[row, :length].sum() for row, length in enumerate(lengths)))
        / seconds[sum(lengths)]
        for lengths in product(range(width + 1), repeat=requests)
    )
    chosen = select(candidates, seconds, best)
    rate = (requests + survival.ravel()[chosen].sum()) / seconds[chosen.sum()]
    assert np.isclose(rate, best)


def test_chains_stand_one_behind_the_other() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1], [0.9, 0.0, 0.0]])
    chains = Candidates.chains(survival, np.array([3, 0, 2, 1]))
    assert chains.request.tolist() == [0, 0, 0, 2, 2, 3]
    assert chains.parent.tolist() == [-1, 0, 1, -1, 3, -1]
    assert chains.survival.tolist() == [0.9, 0.8, 0.7, 0.3, 0.2, 0.9]


def test_of_equals_the_first_are_chosen_and_no_more_than_pay() -> None:
    candidates = Candidates.chains(np.array([[0.5, 0.5], [0.9, 0.5], [0.5, 0.5]]), np.full(3, 2))
    seconds = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0])  # three are free
    chosen = select(candidates, seconds, price=1.0)
    assert chosen.tolist() == [True, True, True, False, False, False]


def test_nothing_is_worth_verifying_at_a_high_price() -> None:
    candidates = Candidates.chains(np.array([[0.9, 0.8]]), np.array([2]))
    assert not select(candidates, np.array([1.0, 2.0, 3.0]), price=1.0).any()
    assert select(candidates, np.array([1.0, 2.0, 3.0]), price=0.5).all()
