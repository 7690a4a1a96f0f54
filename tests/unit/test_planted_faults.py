"""The planted faults still fit the code they are planted in."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from faults.fault import LISTS, OF_GPUS, Fault, read_faults
from support import ROOT

FAULTS = read_faults(LISTS + OF_GPUS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    planted = fault.planted(ROOT)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))


def test_names_are_unique() -> None:
    assert len(FAULTS) >= 60
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
