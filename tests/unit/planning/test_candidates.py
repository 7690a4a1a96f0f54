"""Which drafts to verify, against a search through every possibility."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.candidates import cut_chains, select

# Few different values, so that ties are common.
rates = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
chains = st.lists(st.lists(rates, min_size=3, max_size=3), min_size=1, max_size=3)
steps = st.lists(st.floats(0, 1), min_size=9, max_size=9)
prices = st.floats(0, 5)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Ints, Floats]:
    """Up to eight nodes, each the child of an earlier one or of the bonus token (-1): parents and
    survival."""
    count = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    survival: list[float] = []
    for parent in parents:
        survival.append(draw(rates) * (1.0 if parent < 0 else survival[parent]))
    return np.array(parents, int), np.array(survival, float)


def value(chosen: Bools, worth: Floats, seconds: Floats, price: float) -> float:
    return float(worth[chosen].sum() - price * seconds[chosen.sum()])


def is_closed(chosen: Bools, parents: Ints) -> bool:
    """Whether every chosen token's parent is chosen too."""
    needed = parents[chosen]
    return bool(chosen[needed[needed >= 0]].all())


@given(forests(), steps, prices, st.floats(0, 0.5))
def test_selection_is_the_best_of_all_closed_sets(
    forest: tuple[Ints, Floats], increments: list[float], price: float, toll: float
) -> None:
    """Also where each token costs something of its own, so that it may be worth less than none."""
    parents, survival = forest
    worth, count = survival - toll, len(parents)
    seconds = np.concatenate([[0.0], np.cumsum(increments)])[: count + 1]
    chosen = select(worth, seconds, price)
    assert is_closed(chosen, parents)
    sets = (np.array(bits, dtype=bool) for bits in product([False, True], repeat=count))
    best = max(value(one, worth, seconds, price) for one in sets if is_closed(one, parents))
    assert value(chosen, worth, seconds, price) >= best - 1e-9


@given(chains, st.lists(st.integers(0, 3), min_size=3, max_size=3), steps, prices)
def test_chains_are_cut_where_it_is_best(
    conditional: list[list[float]], limits: list[int], increments: list[float], price: float
) -> None:
    """Against every combination of lengths."""
    survival = np.cumprod(np.array(conditional), axis=1)
    limit = np.array(limits[: len(survival)])
    seconds = np.concatenate([[0.0], np.cumsum(increments)])[: limit.sum() + 1]
    lengths = cut_chains(survival, limit, seconds, price)
    assert (lengths <= limit).all()

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
    seconds = 0.1 + np.concatenate([[0.0], np.cumsum(increments)])[: survival.size + 1]
    best = max(
        (requests + sum(survival[row, :length].sum() for row, length in enumerate(lengths)))
        / seconds[sum(lengths)]
        for lengths in product(range(width + 1), repeat=requests)
    )
    chosen = select(survival.ravel(), seconds, best)
    rate = (requests + survival.ravel()[chosen].sum()) / seconds[chosen.sum()]
    assert np.isclose(rate, best)


def test_of_equals_the_first_are_chosen_and_no_more_than_pay() -> None:
    worth = np.array([0.5, 0.5, 0.9, 0.5, 0.5, 0.5])
    seconds = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0])  # three are free
    chosen = select(worth, seconds, 1.0)
    assert chosen.tolist() == [True, True, True, False, False, False]
    assert cut_chains(worth.reshape(3, 2), np.full(3, 2), seconds, 1.0).tolist() == [2, 1, 0]


def test_nothing_is_worth_verifying_at_a_high_price() -> None:
    worth, seconds = np.array([0.9, 0.8]), np.array([1.0, 2.0, 3.0])
    assert not select(worth, seconds, 1.0).any()
    assert select(worth, seconds, 0.5).all()
