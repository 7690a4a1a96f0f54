"""Many clients of one server: some hang up, ask for too much, or send rubbish; then it is killed.

There are so few sequences and cache blocks that requests wait and are preempted.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.servers import MODEL, Server, serving
from support.waiting import PATIENCE_S, wait_for_end, wait_until

CLIENTS, MAX_MODEL_LEN = 6, 512
FEW = ["--max-num-seqs=4", "--block-size=32", "--num-gpu-blocks-override=20"]
FEW += ["--max-num-batched-tokens=128", "--enforce-eager", "--dtype=float32"]
PROMPTS = held_out_prompts(40)
LONG = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}
"""Four of these do not fit the cache."""
MANY: list[int] = [7] * MAX_MODEL_LEN
# No seeds: their prompts may come in chunks, which ends a CPU engine of vLLM, without drafts too
# ("seeded chunks" in docs/engineering/upstream.md).
SERVED: list[dict[str, Any]] = [
    {},
    {"stop": ["\n", "return"], "logprobs": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"structured_outputs": {"regex": "[a-z]{3,8} = [0-9]{1,3}"}},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "n": 3},
    {"prompt": MANY[4:], "max_tokens": 4},
    {"prompt": MANY[:300], "max_tokens": MAX_MODEL_LEN - 300, "ignore_eos": True},
]
REFUSED: list[dict[str, Any]] = [
    {"prompt": MANY},
    {"prompt": "word " * 40_000},
    {"prompt": [5, 10**6]},
    {"prompt": [1, "two"]},
    {"max_tokens": 10**9},
    {"temperature": "hot"},
    {"n": 0},
]


async def ask(http: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0.0}
    return await http.post("/v1/completions", json=body | changes)


async def hang_up(http: httpx.AsyncClient, chance: random.Random) -> None:
    """Leave in mid-stream, or before there is an answer, perhaps while the request still waits."""
    body = {"model": MODEL, "stream": True, "temperature": 0.0, **LONG}
    try:
        async with (
            asyncio.timeout(chance.uniform(0.005, 1.0)),
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            for _ in range(chance.randint(1, 12)):
                await anext(lines)
    except TimeoutError:
        pass


async def is_served(http: httpx.AsyncClient, **changes: Any) -> None:
    answer = await ask(http, **changes)
    assert answer.status_code == 200, (changes, answer.text[:300])


async def is_refused(http: httpx.AsyncClient, **changes: Any) -> None:
    answer = await ask(http, **changes)
    assert answer.status_code in (400, 422), (str(changes)[:80], answer.text[:300])


async def is_text(http: httpx.AsyncClient, text: str) -> None:
    answer = await ask(http, **LONG)
    assert answer.json()["choices"][0]["text"] == text


async def one_client(url: str, number: int, long_text: str) -> None:
    """Do everything once, in an order of its own, with connections of its own."""
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        todo = [partial(is_served, http, **one) for one in SERVED]
        todo += [partial(is_refused, http, **one) for one in REFUSED]
        todo += [partial(hang_up, http, chance)] * 3 + [partial(is_text, http, long_text)]
        chance.shuffle(todo)
        await is_text(http, long_text)  # all clients at once, which preempts some
        for behave in todo:
            await behave()
        body = '{"model": "' + MODEL + '", "prompt": '
        assert (await http.post("/v1/completions", content=body)).status_code in (400, 415, 422)


async def all_clients(server: Server, long_text: str) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(one_client(server.url, number, long_text))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only folder, where an engine need not write."""
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    shutil.copytree(DRAFTER, folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


@pytest.fixture(scope="module")
def server(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    drafts = ["--speculative-config.method=dflash", f"--speculative-config.model={drafter}"]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, TARGET, *FEW, *drafts) as started:
        yield started


def test_many_clients_at_once(server: Server) -> None:
    """Greedy texts stay the same, only what is wrong is refused, and nothing is left behind."""
    body = {"model": MODEL, "temperature": 0.0, **LONG}
    alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    text = alone.json()["choices"][0]["text"]
    assert text
    asyncio.run(all_clients(server, text))
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_until(
        lambda: not any(server.metric(f"vllm:{name}") for name in held),
        "an engine that has nothing left to do",
    )
    assert "Traceback" not in server.log.read_text()


def test_the_engine_is_killed_under_load(server: Server, drafter: Path) -> None:
    """Clients get an error, not silence; the server exits by itself, and nothing stays behind."""
    endings: list[str] = []
    clients = [
        threading.Thread(target=endless, args=(server, prompt, endings), daemon=True)
        for prompt in PROMPTS[:CLIENTS]
    ]
    for client in clients:
        client.start()
    states = [f"vllm:num_requests_{state}" for state in ("running", "waiting")]
    wait_until(lambda: sum(map(server.metric, states)) == CLIENTS, "all in flight")
    family = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [process for process in family if "EngineCore" in process.name()]
    engine.send_signal(signal.SIGKILL)
    server.process.wait(PATIENCE_S)  # exit code 0 was seen, so the code says nothing
    for client in clients:
        client.join(PATIENCE_S)
    assert len(endings) == CLIENTS, "a client still waits"
    assert set(endings) <= {"InternalServerError", "APIConnectionError", "APIError"}, endings
    wait_for_end(family)
    assert "is active" in server.log.read_text()
    assert sorted(path.name for path in drafter.iterdir()) == ["config.json", "model.safetensors"]
    server.log.write_text("")  # it is full of the engine's death, which `serving` takes for a fault


def endless(server: Server, prompt: str, endings: list[str]) -> None:
    """A client that asks again as long as it is answered."""
    while True:
        try:
            with server.client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=400,
                stream=True,
                timeout=PATIENCE_S,
                extra_body={"ignore_eos": True},
            ) as stream:
                for _ in stream:
                    pass
        except openai.APIError as error:
            endings.append(type(error).__name__)
            return
        except httpx.RemoteProtocolError:  # the connection broke in mid-stream
            endings.append("APIConnectionError")
            return
