"""Find what runs an engine: ours, vLLM's own DFlash as without us, or neither.

Only configs are made: no engine is started. In its own process, cells on a faked CUDA device:

python -m support.who_runs CELLS
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

OURS, VLLMS = "ours", "vLLM's"
Settings = dict[str, Any]


@dataclass(frozen=True)
class EngineCell:
    """One engine: a drafter, a target, and settings."""

    runs: str
    """DFlash that must run it: `OURS` or `VLLMS`."""
    words: str = ""
    """Words of the line that says why it is vLLM's."""
    speculative: Settings = field(default_factory=dict)
    """Settings of the speculative config; None: without this one."""
    settings: Settings = field(default_factory=dict)
    """Settings of the engine. Names in capitals are variables of the environment."""
    drafter: Settings = field(default_factory=dict)
    """Changes to the drafter's config; None: without this field."""
    family: str = ""
    """The target's, if it is not the pair's own."""


OWN_KEYS: Settings = {"draft_length": "fixed", "free_drafts": "off"}


def engine(pair: Any, speculative: Settings, settings: Settings) -> Any:
    """Return arguments of a pair's engine (`target` and `drafter`), with all that vLLM needs."""
    from vllm.engine.arg_utils import EngineArgs

    asked = {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 7}
    asked |= speculative
    plain = {"model": str(pair.target), "max_model_len": 256, "skip_tokenizer_init": True}
    return EngineArgs(
        **{**plain, **{name: value for name, value in settings.items() if not name.isupper()}},
        speculative_config={name: value for name, value in asked.items() if value is not None},
    )


def outcome(
    pair: Any, speculative: Settings, settings: Settings, *, alone: bool = False
) -> dict[str, Any]:
    """Return the result of an engine's start, as far as a plugin could change it; `alone`: without
    our hook, as with `VLLM_PLUGINS=""`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))  # a hook adds ours
        for name in filter(str.isupper, settings):
            patch.setenv(name, settings[name])
        if alone:
            hook = EngineArgs.create_speculative_config
            patch.setattr(EngineArgs, "create_speculative_config", hook.__wrapped__)
        try:
            config = engine(pair, speculative, settings).create_engine_config()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    speculation, draft = config.speculative_config, config.speculative_config.draft_model_config
    left_out = ("target_model_config", "draft_model_config")
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "one cache group": config.scheduler_config.disable_hybrid_kv_cache_manager,
        "additional": config.additional_config,
        "speculative": {
            one.name: str(getattr(speculation, one.name))
            for one in fields(speculation)
            if one.name not in left_out and not one.name.endswith("parallel_config")
        },
        "draft": str(draft.hf_config.to_dict()),
        "architectures": draft.architectures,
    }


def who_runs(
    pair: Any, speculative: Settings, settings: Settings, alone: dict[str, Any]
) -> tuple[str, str]:
    """Return OURS, VLLMS if it starts as `alone`, or what happens instead; and the log's line."""
    from support.log_lines import log_lines
    from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY

    with log_lines() as lines:
        found = outcome(pair, speculative, settings)
    left = [line for line in lines if "vllm-dflash stays out: " in line]
    if found == alone and len(left) == 1:
        return VLLMS, left[0]
    is_ours = ADDITIONAL_CONFIG_KEY in found.get("additional", ())
    return (OURS, "") if is_ours and not left else (f"{found}, said {left}", "")


def changed(pair: Any, cell: EngineCell, folder: Path) -> Any:
    """Return the pair with a cell's drafter and target. Others are written to this folder."""
    from support.pairs import Pair, as_speculators, drafter_config
    from support.targets import write_config

    drafter, target = pair.drafter, pair.target
    if cell.drafter:
        drafter = folder / "some-dflash"
        shutil.copytree(pair.drafter, drafter)
        config = drafter_config(**cell.drafter)
        if "speculators_model_type" in cell.drafter:
            config = as_speculators(drafter_config()) | cell.drafter
        written = {name: value for name, value in config.items() if value is not None}
        (drafter / "config.json").write_text(json.dumps(written))
    if cell.family:
        target = folder / "target"
        target.mkdir()
        write_config(target, cell.family)
    return Pair(target, drafter, pair.spec)


def ends(pair: Any, cell: EngineCell) -> tuple[Any, Any, str]:
    """Return who runs a cell; who does if our own keys are set as well and the number of drafts,
    which vLLM asks for, is not; and what is said of it, as far as it is expected."""
    with tempfile.TemporaryDirectory() as folder:
        pair = changed(pair, cell, Path(folder))
        alone = outcome(pair, cell.speculative, cell.settings, alone=True)
        if "error" in alone:
            return "nobody", alone, ""
        own = {"num_speculative_tokens": None, **OWN_KEYS, **cell.speculative}
        plain, line = who_runs(pair, cell.speculative, cell.settings, alone)
        with_own, _ = who_runs(pair, own, cell.settings, alone)
        return plain, with_own, cell.words if cell.words in line else line


def main() -> None:
    """Print one line of JSON for each cell."""
    from support.faked_cuda import fake_cuda

    platform = fake_cuda()
    platform.capability = (9, 0)
    platform.device_count = staticmethod(lambda: 2)
    from support.pairs import make_pair

    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(Path(folder))
        for cell in json.loads(sys.argv[1]):
            print(json.dumps({"ends": ends(pair, EngineCell(**cell))}), flush=True)


if __name__ == "__main__":
    main()
