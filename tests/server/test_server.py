"""A real `vllm serve`, compiled as users run it, driven by the openai client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.servers import MODEL, Server, serving
from support.waiting import wait_until

PROMPT = held_out_prompts(87)[-1]
"""Each of the first 48 tokens after it is best by 0.3 nat: also in bfloat16, in any batch."""


def dflash(drafter: Path) -> list[str]:
    return [
        f"--speculative-config.{key}={value}"
        for key, value in (("method", "dflash"), ("model", drafter))
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = "--max-num-seqs=16", "--per-request-spec-decode-metrics=detailed"
    with serving(log, TARGET, *arguments, *dflash(DRAFTER)) as ready:
        yield ready


def test_the_warning_of_our_scheduler_is_explained(server: Server) -> None:
    lines = server.log.read_text().splitlines()
    (custom,) = (n for n, line in enumerate(lines) if "Using custom scheduler class" in line)
    explained = "vLLM's warning of a custom scheduler class is expected"
    assert any(explained in line for line in lines[custom:])


def test_our_figures_stand_beside_vllms(server: Server) -> None:
    def figure(name: str) -> float:
        return server.metric(f"vllm:dflash_{name}_total")

    before = figure("step_seconds")
    for prompt in held_out_prompts(4):
        server.complete(prompt)
    # The rest is sent when the engine has no more requests.
    wait_until(lambda: figure("step_seconds") > before, "figures of these steps")
    assert 0 < figure("planning_seconds") < figure("step_seconds")
    assert figure("drafted_steps") + figure("skipped_steps") > 0
    verified = server.metric("vllm:spec_decode_num_draft_tokens_total")
    free = figure("free_draft_tokens")
    assert free >= figure("free_accepted_tokens")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted >= figure("free_accepted_tokens")
    assert verified > 0
    assert verified - free <= figure("planned_tokens")  # a request's last ones are not verified
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    assert drafts <= figure("drafted_requests") + free
    text = httpx.get(f"{server.url}/metrics").text
    assert f'vllm:dflash_skipped_steps_total{{engine="0",model_name="{MODEL}"}} ' in text


def answer(server: Server, prompt: str, **options: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body | {"vllm_xargs": options}, timeout=60)


def test_a_request_limits_its_drafts(server: Server) -> None:
    """Whatever it says, its text stays. What is not understood is refused."""
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    expected, before = server.complete(PROMPT), server.metric(drafted)
    plain = answer(server, PROMPT, **{"dflash.max_drafts": 0})
    assert plain.json()["choices"][0]["text"] == expected
    assert server.metric(drafted) == before
    for option in ({"dflash.max_drafts": -1}, {"dflash.max_drafts": "2"}, {"dflash.drafts": 2}):
        refused = answer(server, PROMPT, **option)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert next(iter(option)) in message
        assert "an integer, 0 or more" in message


def test_an_answer_says_what_became_of_its_drafts(server: Server) -> None:
    """vLLM's figures of each request: on V1 they add up to those of `/metrics`."""
    names = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    prompts = itertools.cycle(held_out_prompts(40))

    def both() -> tuple[float, ...]:
        return tuple(map(server.metric, names))

    def counts_of(prompt: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = answer(server, prompt, **options).json()["metrics"]
        return found["speculative_decoding"]

    def some_are_accepted() -> bool:
        before = both()
        found = counts_of(next(prompts))
        counts = found["num_draft_tokens"], found["num_accepted_draft_tokens"]
        expected = before[0] + counts[0], before[1] + counts[1]
        wait_until(lambda: both() == expected, f"{counts} drafted and accepted in /metrics")
        assert sum(found["per_step_drafted"] or []) == found["num_draft_tokens"]
        assert sum(found["per_step_accepted"] or []) == found["num_accepted_draft_tokens"]
        assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
        return found["num_accepted_draft_tokens"] > 0

    wait_until(some_are_accepted, "an answer of which drafts are accepted")
    plain = counts_of(next(prompts), **{"dflash.max_drafts": 0})
    assert (plain["num_spec_steps"], plain["num_draft_tokens"]) == (0, 0)
    limited = [counts_of(next(prompts), **{"dflash.max_drafts": 2}) for _ in range(4)]
    assert all(count <= 2 for one in limited for count in one["per_step_drafted"] or [])


def test_scored_tokens_beside_a_text_that_is_drafted(server: Server) -> None:
    """One such request used to end the engine for all, in any step that verified drafts."""

    def scores() -> list[float]:
        body: dict[str, Any] = {"model": MODEL, "query": PROMPT, "items": [" self", ":"]}
        body |= {"label_token_ids": [5, 260], "apply_softmax": False}
        answer = httpx.post(f"{server.url}/generative_scoring", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [one["score"] for one in answer.json()["data"]]

    alone, expected = scores(), server.complete(PROMPT, max_tokens=200)
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before = server.metric(accepted)
    stream = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=200, temperature=0.0, logprobs=2, stream=True
    )
    pieces = [next(iter(stream)).choices[0].text]
    for _ in range(6):
        assert scores() == pytest.approx(alone, rel=2e-2)
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == expected
    assert server.metric(accepted) > before
    chat = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        temperature=0.0,
        logprobs=True,
        extra_body={"logprob_token_ids": [5, 260], "ignore_eos": True},
    )
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == 8
