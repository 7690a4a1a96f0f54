"""The pair of models that many unit tests read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.pairs import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a tiny random pair, which no test changes."""
    from support.pairs import make_pair  # not before the runner is chosen

    return make_pair(tmp_path_factory.mktemp("pair"))
