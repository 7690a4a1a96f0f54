"""A target's class is not imported in the front end, and what we read from its source is true.

Importing some classes makes vLLM spawn its engine instead of forking it, and a script with
`LLM(...)` but without `if __name__ == "__main__"` then runs a second time in the new process.
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from support import importing_support
from support.faked_cuda import lines_on_cuda
from vllm_dflash.config.engine_options import GPU_WORKER
from vllm_dflash.config.target_class import provides_hidden_states

STARTS_CUDA = (
    "flashinfer.comm",
    "vllm.compilation.backends",
    "vllm.model_executor.models.qwen3_next",
    "vllm.third_party.flash_linear_attention.ops.utils",
)
"""Modules: the second imports the first, the third the last."""
COMPARE = """
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_eagle3

from unit.config.test_target_class import said_of

compared = 0
for name in {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}:
    try:
        loaded = registry.ModelRegistry.models[name].load_model_cls()
    except Exception:  # it wants what is not installed
        continue
    compared += 1
    assert said_of(name) or not supports_eagle3(loaded), name
assert compared > 100, compared
"""


def said_of(architecture: str) -> bool:
    config: Any = SimpleNamespace(registry=ModelRegistry, architecture=architecture)
    return provides_hidden_states(config)


def test_the_front_end_imports_nothing_that_starts_cuda() -> None:
    """For all kinds of drafters and of targets."""
    lines = lines_on_cuda("support.front_end_child")
    found = {
        line["case"]: [name for name in STARTS_CUDA if name in line["modules"]] for line in lines
    }
    cases = ("full", "full DFlash 2", "full LiLiCorr", "mixed", "hybrid")
    assert found == {case: [] for case in cases}
    for line in lines:
        assert line["worker"] == GPU_WORKER
        assert {"vllm_dflash.model.draft_model", "flashinfer.decode"} <= {*line["modules"]}


@pytest.mark.parametrize(
    ("architecture", "is_so"),
    [
        ("Qwen3ForCausalLM", True),
        ("Qwen3NextForCausalLM", True),
        ("Qwen3_5MoeForConditionalGeneration", True),  # by way of another file
        ("TransformersForCausalLM", True),  # by way of a mixin
        ("OPTForCausalLM", False),
        ("NobodysForCausalLM", True),
    ],
)
def test_what_a_source_says(architecture: str, is_so: bool) -> None:
    assert said_of(architecture) == is_so


@pytest.mark.slow
def test_no_class_is_said_to_do_less_than_it_does() -> None:
    """Compare all models that can be imported here. Classes chosen per platform may do less."""
    environment = {**os.environ, **importing_support()}
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
