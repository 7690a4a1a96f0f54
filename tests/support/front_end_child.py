"""Print what the front end imports for engines on a faked CUDA device, one line of JSON each.

python -m support.front_end_child
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.faked_cuda import fake_cuda


class Asked:
    """Notes which modules of FlashInfer, whose stand-in is empty, are to be imported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, *others: Any) -> None:
        if name.startswith("flashinfer."):
            self.names.append(name)


def main() -> None:
    """Fork a process for each pair, because a module is imported only once."""
    fake_cuda().capability = (9, 0)
    from support.pairs import dflash2_config, drafter_config, lilicorr_config, save_drafter
    from support.selection_config import HEADS, create_config, write_pair
    from support.selection_table import Cell

    kinds: dict[str, Any] = {"": {}, "DFlash 2": dflash2_config(), "LiLiCorr": lilicorr_config()}
    sys.meta_path.insert(0, asked := Asked())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder)
        for target, kind in [*(("full", kind) for kind in kinds), ("mixed", ""), ("hybrid", "")]:
            if os.fork():
                assert os.wait()[1] == 0
                continue
            save_drafter(folder / "drafter", drafter_config(**HEADS | kinds[kind]))
            config = create_config(folder, Cell("9.0", target=target))
            line = {
                "case": f"{target} {kind}".strip(),
                "worker": config.parallel_config.worker_cls,
                "modules": sorted(sys.modules) + asked.names,
            }
            print(json.dumps(line), flush=True)
            os._exit(0)


if __name__ == "__main__":
    main()
