"""Reasoning over HTTP ends where it ends in plain decoding, streamed or not."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.servers import MODEL, Server, serving

pytestmark = pytest.mark.slow  # two servers
MARKS = {"<|im_start|>": "<think>", "<|im_end|>": "</think>"}
FLAGS = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-num-seqs=8",
    "--reasoning-parser=deepseek_r1",
    '--reasoning-config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
)
DFLASH = [f'--speculative-config={{"method": "dflash", "model": "{DRAFTER}"}}']
BUDGETS = (0, 3, 6, 9, 12)
"""Tokens of thinking; the last two end within or after a block of 7 drafts."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target, whose tokens 2 and 3 are the marks of thinking."""
    folder = tmp_path_factory.mktemp("thinks") / "target"
    shutil.copytree(TARGET, folder)
    file = folder / "tokenizer.json"
    written = file.read_text()
    for old, new in MARKS.items():
        written = written.replace(json.dumps(old), json.dumps(new))
    tokenizer = json.loads(written)
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] not in MARKS.values()  # it is part of the text
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of plain decoding and ours, with all budgets at once, whole and streamed."""
    found: dict[str, Any] = {}
    for name, more, plugins in (("plain", [], ""), ("ours", DFLASH, "dflash")):
        log = tmp_path_factory.mktemp(name) / "log"
        environment = {"VLLM_PLUGINS": plugins}
        with serving(log, target, *FLAGS, *more, environment=environment) as server:
            with ThreadPoolExecutor(2 * len(BUDGETS)) as pool:
                whole = pool.map(lambda budget: ask(server, budget), BUDGETS)
                streamed = pool.map(lambda budget: ask_streamed(server, budget), BUDGETS)
                found[name] = [*whole], [*streamed]
            found[f"{name}: accepted"] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    return found


def body(budget: int, **more: Any) -> dict[str, Any]:
    text = held_out_prompts(len(BUDGETS))[BUDGETS.index(budget)][-60:] + "<think>"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 32}
    return {
        **asked,
        "temperature": 0,
        "ignore_eos": True,
        "thinking_token_budget": budget,
        **more,
    }


def ask(server: Server, budget: int) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(budget), timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    message = found["choices"][0]["message"]
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "usage": found["usage"],
    }


def ask_streamed(server: Server, budget: int) -> dict[str, Any]:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    url = f"{server.url}/v1/chat/completions"
    found: dict[str, Any] = {"reasoning": "", "content": "", "usage": {}}
    with httpx.stream("POST", url, json=body(budget, **more), timeout=120) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            found["usage"] = chunk.get("usage") or found["usage"]
            for choice in chunk["choices"]:
                for part in ("reasoning", "content"):
                    found[part] += choice["delta"].get(part) or ""
    return found


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "streamed"])
def test_reasoning_ends_where_plain_decodings_does(answers: dict[str, Any], way: int) -> None:
    """Both parts have the same text, and token counts agree, those of reasoning included."""
    assert answers["ours"][way] == answers["plain"][way]
    assert answers["ours: accepted"] > 0
    for one in answers["plain"][way]:
        assert one["content"]
        assert one["usage"]["completion_tokens"] == 32
    assert len({len(one["reasoning"]) for one in answers["plain"][way]}) > 2


def test_streamed_parts_are_the_whole(answers: dict[str, Any]) -> None:
    whole, streamed = answers["ours"]
    assert [one["reasoning"] for one in streamed] == [one["reasoning"] for one in whole]
    assert [one["content"] for one in streamed] == [one["content"] for one in whole]
