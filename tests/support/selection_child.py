"""Start engines on a faked CUDA device of each compute capability; print a line of JSON each.

python -m support.selection_child
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from support.faked_cuda import fake_cuda
from support.selection_table import CAPABILITIES, Row, cells, to_line


def main() -> None:
    """Fork a process for each capability, because vLLM asks for it once and remembers."""
    platform = fake_cuda()
    from support.selection_config import write_pair

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder)
        for capability in CAPABILITIES:
            if os.fork():
                assert os.wait()[1] == 0
                continue
            platform.capability = tuple(int(part) for part in capability.split("."))
            from support.selection_engine import run, stand_in_for_a_device

            stand_in_for_a_device()
            for cell in cells(capability):
                try:
                    row = run(folder, cell)
                except Exception as error:  # the table says this of the cell
                    row = Row(cell, error=f"{type(error).__name__}: {error}")
                print(to_line(row), flush=True)
            os._exit(0)


if __name__ == "__main__":
    main()
