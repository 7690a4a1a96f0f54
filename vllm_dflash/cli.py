"""Command line: `vllm-dflash inspect DRAFTER --target TARGET`."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    return 0
