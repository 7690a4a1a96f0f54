"""Which drafts to verify, against a search of all possibilities."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.search import cut_chains

# Few different values, so that ties are common.
rates = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
chains = st.lists(st.lists(rates, min_size=3, max_size=3), min_size=1, max_size=3)
steps = st.lists(st.floats(0, 1), min_size=9, max_size=9)
prices = st.floats(0, 5)


@given(
    chains,
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    steps,
    prices,
    st.lists(st.floats(0, 0.5), min_size=3, max_size=3),
)
def test_chains_are_cut_where_it_is_best(
    conditional: list[list[float]],
    limits: list[int],
    increments: list[float],
    price: float,
    tolls: list[float],
) -> None:
    """Compared with every combination of lengths. A request's drafts may have a cost of their own,
    and be worth less than nothing."""
    survival = np.cumprod(np.array(conditional), axis=1)
    survival -= np.array(tolls[: len(survival)])[:, None]
    limit = np.array(limits[: len(survival)])
    seconds = np.concatenate([[0.0], np.cumsum(increments)])[: limit.sum() + 1]
    lengths = cut_chains(survival, limit, seconds, price)
    assert (lengths <= limit).all()

    def value(combination: tuple[int, ...]) -> float:
        gain = sum(survival[row, :length].sum() for row, length in enumerate(combination))
        return float(gain - price * seconds[sum(combination)])

    best = max(value(lengths) for lengths in product(*(range(n + 1) for n in limit)))
    assert value(tuple(lengths)) >= best - 1e-9


def test_of_equals_the_first_are_chosen_and_no_more_than_pay() -> None:
    worth = np.array([[0.5, 0.5], [0.9, 0.5], [0.5, 0.5]])
    seconds = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0])  # three are free
    assert cut_chains(worth, np.full(3, 2), seconds, 1.0).tolist() == [2, 1, 0]
