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

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Qwen3", {}),
    "mixed": (
        "Llama",
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "hybrid": ("Qwen3Next", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
}


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
    from support.pairs import Pair, dflash2_config, drafter_config, lilicorr_config, save_drafter
    from support.targets import write_config

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    kinds: dict[str, Any] = {"": {}, "DFlash 2": dflash2_config(), "LiLiCorr": lilicorr_config()}
    sys.meta_path.insert(0, asked := Asked())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for target, kind in [*(("full", kind) for kind in kinds), ("mixed", ""), ("hybrid", "")]:
            if os.fork():
                assert os.wait()[1] == 0
                continue
            family, fields = TARGETS[target]
            write_config(folder / target, family, dtype="bfloat16", **heads, **fields)
            spec = save_drafter(folder / "drafter", drafter_config(**heads | kinds[kind]))
            config = Pair(folder / target, folder / "drafter", spec).start(dtype="bfloat16")
            line = {
                "case": f"{target} {kind}".strip(),
                "worker": config.parallel_config.worker_cls,
                "modules": sorted(sys.modules) + asked.names,
            }
            print(json.dumps(line), flush=True)
            os._exit(0)


if __name__ == "__main__":
    main()
