"""The gate on real servers: a clean one passes, and faults planted in acceptance are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support import importing_support
from support.engines import FIXED, TARGET, held_out_prompts
from vllm_dflash.tools.completions import Request, complete, counts, decode, encode, steps
from vllm_dflash.tools.server import Server
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Verification
from vllm_dflash.tools.verify.verify_command import plain_server

PROMPTS = held_out_prompts(8)
SETTINGS = GateSettings(concurrency=(2, 8), tokens=32)
FLAGS = ("--enforce-eager", "--max-model-len", "512", "--block-size", "32", "--dtype", "float32")

pytestmark = pytest.mark.engine
Gate = Callable[..., Verification]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with plain_server(tmp_path_factory.mktemp("plain") / "log", str(TARGET), FLAGS) as one:
        one.wait()
        yield one


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that says which fault DFlash's server has."""
    file = tmp_path_factory.mktemp("planted") / "fault"
    file.touch()
    return file


@pytest.fixture(scope="module")
def dflash(planted: Path) -> Iterator[Server]:
    environment = importing_support() | {"PLANTED": str(planted)}
    flags = [*FLAGS, "--max-num-seqs", "8"]
    started = Server(
        planted.with_name("log"),
        str(TARGET),
        flags,
        speculative_config=FIXED,
        environment=environment,
        module="support.planted_server",
    )
    with started as one:
        one.wait()
        yield one


@pytest.fixture
def gate(plain: Server, dflash: Server, planted: Path) -> Iterator[Gate]:
    """The gate on running servers."""

    def verify_demo(fault: str = "", **changes: Any) -> Verification:
        planted.write_text(fault)
        settings = replace(SETTINGS, **changes)
        return verify(PROMPTS, lambda: nullcontext(dflash), lambda: nullcontext(plain), settings)

    yield verify_demo
    planted.write_text("")


def test_float32_is_lossless(gate: Gate) -> None:
    result = gate()
    assert result.verdict == "lossless"
    assert result.tie == 0
    for level in result.levels:
        assert level.identical == len(PROMPTS)
        assert level.acceptance_length is not None
        assert level.acceptance_length > 2


@pytest.mark.parametrize("fault", ["one too many", "unverified"])
def test_a_planted_fault_is_caught(gate: Gate, fault: str) -> None:
    result = gate(fault)
    assert (result.verdict, result.exit_code) == ("regression", 1)
    for level in result.levels:
        assert level.with_regressions == len(PROMPTS)
        # Not only the first of each text: there is one in nearly every step.
        assert level.regressions > 4 * len(PROMPTS)
        assert level.worst is not None
        assert level.worst.regret > 1


def test_regret_is_that_of_the_full_distribution(plain: Server) -> None:
    """For several requests at once, scored ones among others."""
    (prompt,) = encode(plain, PROMPTS[:1])
    tokens = list(range(5, 25))
    requests = [Request(prompt, 1, token) for token in tokens] + [Request(prompt, 6)]
    *scored, written = complete(plain, requests, 32)
    assert len(written.tokens) == 6
    assert written.regret is None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(TARGET), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = (logits.max() - logits[tokens]).tolist()
    assert [one.regret for one in scored] == pytest.approx(expected, abs=1e-3)
    assert {one.tokens[0] for one in scored} == {int(logits.argmax())} == {written.tokens[0]}


def test_a_text_step_by_step(plain: Server, dflash: Server) -> None:
    """DFlash writes its accepted drafts together. Messages go through the chat template."""
    (message,) = encode(plain, ["What is a keel?"], {"enable_thinking": False})
    assert decode(plain, message) == "What is a keel?\n"  # the demo target's
    (prompt,) = encode(plain, PROMPTS[:1])
    (written,) = complete(plain, [Request(prompt, 12)], 1)
    before = counts(dflash)
    ours = [*steps(dflash, Request(prompt, 12))]
    assert [token for step in ours for token in step] == written.tokens
    drafted = counts(dflash)["drafts"] - before["drafts"]
    assert len(ours) == 1 + drafted < 12  # nothing is drafted in the prompt's own step
