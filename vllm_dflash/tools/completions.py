"""What commands ask of a server: texts, their tokens, and counts of drafts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, cast

from vllm_dflash.tools.server import Server
from vllm_dflash.tools.server_process import Facts

SPEC_METRICS = "vllm:spec_decode_num_"


class Request(NamedTuple):
    """Tokens to continue greedily."""

    tokens: Sequence[int]
    max_tokens: int
    scored: int | None = None
    """A token whose regret as the next one to report."""


class Finished(NamedTuple):
    """A finished request."""

    tokens: list[int]
    """New tokens, including the stop token if there is one."""
    regret: float | None
    """Regret of the request's `scored` token, in nat."""


def encode(
    server: Server, texts: Sequence[str], template: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Tokenize each text as a prompt.

    If `template` is given, each text is a user's message, to which the chat template is applied
    with `template` as extra arguments.
    """
    return [server.ask("/tokenize", _prompt(text, template))["tokens"] for text in texts]


def make_requests(
    prompts: Sequence[Sequence[int]], tokens: int, concurrency: int, facts: Facts
) -> list[Request]:
    """Make a request per prompt, for this many tokens or up to the engine's limit.

    Raises:
        ValueError: the concurrency exceeds the engine's, or a prompt is empty or leaves no room.
    """
    if concurrency > (taken := facts["max_num_seqs"]):
        raise ValueError(
            f"concurrency {concurrency} is more than the {taken} requests the engine takes"
            " at a time: raise --max-num-seqs (after --), or lower the concurrency."
        )
    requests, max_model_len = [], facts["max_model_len"]
    tokens = min(tokens, facts["max_new_tokens"] or tokens)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty.")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room for new ones in"
                f" {max_model_len}: leave it out, or raise the engine's --max-model-len."
            )
        requests.append(Request(prompt, min(tokens, max_model_len - len(prompt))))
    return requests


def decode(server: Server, tokens: Sequence[int]) -> str:
    """Return the text of these tokens."""
    return cast("str", server.ask("/detokenize", {"tokens": list(tokens)})["prompt"])


def counts(server: Server) -> dict[str, float]:
    """Return vLLM's counters of speculative decoding since the engine started.

    drafts (a request's steps that verified any), draft_tokens, accepted_tokens. Empty without
    speculative decoding.
    """
    return {
        name.removeprefix(SPEC_METRICS).removesuffix("_total"): value
        for name, value in read_metrics(server).items()
        if name.startswith(SPEC_METRICS) and name.endswith("_total")
    }


def read_metrics(server: Server) -> dict[str, float]:
    """Read what a server tells Prometheus: the sum of each metric over its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with server.answer("/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    found = defaultdict[str, float](float)
    for sample in (sample for family in families for sample in family.samples):
        found[sample.name] += sample.value
    return found


def complete(
    server: Server,
    requests: Sequence[Request],
    concurrency: int,
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Finished]:
    """Run requests, `concurrency` at a time, and return them in the given order.

    `on_finished` gets the number finished. Raises as `Server.ask` does.
    """
    pool = ThreadPoolExecutor(concurrency)
    try:
        running = [pool.submit(_complete, server, one) for one in requests]
        for count, done in enumerate(as_completed(running), 1):
            done.result()  # a failure ends all
            on_finished(count)
        return [one.result() for one in running]
    finally:  # without waiting: after an interrupt, the end of the server ends its requests
        pool.shutdown(wait=False, cancel_futures=True)


def steps(server: Server, request: Request) -> Iterator[list[int]]:
    """Yield a request's new tokens, one list per step of its engine.

    Raises as `Server.ask` does.
    """
    body = {**_completion(request), "stream": True}
    with server.answer("/v1/completions", body) as response:
        for line in response:
            event = line.removeprefix(b"data: ").strip()
            if event.startswith(b'{"error"'):
                server.refuse(event.decode(), died=True)
            if event.startswith(b"{"):
                (choice,) = json.loads(event)["choices"]
                if choice["token_ids"]:
                    yield choice["token_ids"]


def _complete(server: Server, request: Request) -> Finished:
    (choice,) = server.ask("/v1/completions", _completion(request))["choices"]
    if request.scored is None:
        return Finished(choice["token_ids"], None)
    first = choice["logprobs"]["top_logprobs"][0]  # always with the most likely token, too
    return Finished(choice["token_ids"], max(first.values()) - first[f"token_id:{request.scored}"])


def _prompt(text: str, template: Mapping[str, Any] | None) -> dict[str, Any]:
    if template is None:
        return {"prompt": text}
    message = {"role": "user", "content": text}
    return {"messages": [message], "chat_template_kwargs": template}


def _completion(request: Request) -> dict[str, Any]:
    """Return the body of a request for greedy tokens, whatever the target's own defaults are."""
    body: dict[str, Any] = {
        "prompt": list(request.tokens),
        "max_tokens": request.max_tokens,
        "return_token_ids": True,
        "temperature": 0,
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
    }
    if request.scored is not None:
        scored = {"logprobs": 1, "logprob_token_ids": [request.scored]}
        body |= scored | {"return_tokens_as_token_ids": True}
    return body
