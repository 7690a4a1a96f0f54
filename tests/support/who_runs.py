"""Find what runs an engine: ours, vLLM's own DFlash, or neither; and whether vLLM alone starts it.

Only configs are made: no engine is started. In its own process, cells on a faked CUDA device:

python -m support.who_runs CELLS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS, VLLMS = "ours", "vLLM's"
Settings = dict[str, Any]
Cell = tuple[str, Settings, Settings]
"""Expected runner of an engine; settings of the speculative config, and of the engine. Among these,
names in capitals are variables of the environment."""


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


@contextmanager
def surroundings(settings: Settings) -> Iterator[None]:
    """Set the environment's variables among them. Afterwards restore these and vLLM's registry of
    models: ours is in it only while our hook is."""
    from vllm.model_executor.models.registry import ModelRegistry

    before = dict(os.environ), dict(ModelRegistry.models)
    os.environ.update({name: value for name, value in settings.items() if name.isupper()})
    try:
        yield
    finally:
        for now, then in ((os.environ, before[0]), (ModelRegistry.models, before[1])):
            now.clear()
            now.update(then)


def starts_alone(pair: Any, speculative: Settings, settings: Settings) -> bool:
    """Return whether vLLM makes the config without our hook, as with `VLLM_PLUGINS=""`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    hook = EngineArgs.create_speculative_config
    EngineArgs.create_speculative_config = hook.__wrapped__
    try:
        with surroundings(settings):
            engine(pair, speculative, settings).create_engine_config()
    except Exception:
        return False
    finally:
        EngineArgs.create_speculative_config = hook
    return True


def who_runs(pair: Any, speculative: Settings, settings: Settings) -> str:
    """Return OURS, VLLMS, or why neither does. One line of the log announces vLLM's own."""
    from support.log_lines import log_lines
    from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY

    with log_lines() as lines, surroundings(settings):
        try:
            config = engine(pair, speculative, settings).create_engine_config()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    left = [line for line in lines if "vllm-dflash stays out: " in line]
    is_ours = ADDITIONAL_CONFIG_KEY in config.additional_config
    if len(left) != (not is_ours):
        return f"said {left}"
    return OURS if is_ours else VLLMS


def ends(pair: Any, cell: Cell) -> dict[str, Any]:
    """Return the outcome of a cell: alone, with us, and with us if our own keys are set as well and
    the number of drafts, which vLLM asks for, is not."""
    _, speculative, settings = cell
    own = {"num_speculative_tokens": None, "draft_length": "fixed", "free_drafts": "off"}
    return {
        "alone": starts_alone(pair, speculative, settings),
        "with us": who_runs(pair, speculative, settings),
        "with keys of ours": who_runs(pair, own | speculative, settings),
    }


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
            print(json.dumps(ends(pair, cell)), flush=True)


if __name__ == "__main__":
    main()
