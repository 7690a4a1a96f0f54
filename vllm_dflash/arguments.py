"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return int(text)


def not_negative(text: str) -> float:
    """A finite number from 0 on: as a limit, anything else would let everything or nothing pass."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return number
