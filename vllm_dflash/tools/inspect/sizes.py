"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

FACTORS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "m", "g", "t"), 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate(("k", "m", "g", "t"), 1)},
}
GIB = 1 << 30


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `4 GB`, `1.5GiB`, `512MiB` or `4294967296`.

    Raises:
        ValueError: it is no positive size; the message gives examples.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = int(float(match[1]) * FACTORS[match[2] or ""]) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no size: write 4GiB, 512MiB, 4GB or a number of bytes")
    return size


def format_size(size: int) -> str:
    """Three digits or so and a binary unit: `2.10 GiB`, `18.0 KiB`, `640 B`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{size} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
