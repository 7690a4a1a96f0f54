"""`examples/ray_serve.py` with two replicas: the route, and what a client sees when one dies."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from vllm import LLM

from ray_engines.client_errors import REPLICA_DIED
from support import ROOT
from support.engines import greedy, held_out_prompts
from support.replica_load import TOKENS, Asked, Load, of_kind, served_by
from support.servers import MODEL, Server, free_port, running
from support.waiting import PATIENCE_S, wait_for_end, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow]  # replicas start, die and start again
EXAMPLE = ROOT / "examples" / "ray_serve.py"
PROMPTS = held_out_prompts(6)
REPLICA, ENGINE = "ServeReplica", "EngineCore"
ENGINE_DIED = "EngineCore encountered an issue"


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[str]:
    """Texts that plain decoding writes."""
    params = greedy(TOKENS, ignore_eos=True)
    return [answer.outputs[0].text for answer in plain.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two replicas. At the end nothing of them is left, though one is just starting."""
    log, port = tmp_path_factory.mktemp("ray_serve") / "log", free_port()
    command = [sys.executable, str(EXAMPLE), "--port", str(port), "--max-model-len", "512"]
    command += ["--", "--enforce-eager", "--dtype", "float32"]
    command += ["--speculative-config.draft_length", "fixed"]  # planning is not tested here
    folders = set(Path(tempfile.gettempdir()).glob("dflash-ray-*"))
    # An engine in this process has told vLLM's children to start no processes of their own.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with running(command, port, log, environment) as ready:  # one replica is ready
        wait_until(lambda: "Serving" in log.read_text(), "both ready")
        yield ready
    assert set(Path(tempfile.gettempdir()).glob("dflash-ray-*")) <= folders


def children(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def load_on(server: Server) -> Load:
    return Load(server.client.with_options(max_retries=0, timeout=PATIENCE_S), MODEL, PROMPTS)


def test_the_route_is_vllms(server: Server, expected: list[str]) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.complete(PROMPTS[0], TOKENS).startswith(expected[0][:40])
    chat = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=8
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
    with pytest.raises(openai.NotFoundError, match="nobody"):
        server.client.completions.create(model="nobody", prompt="a")


@pytest.mark.parametrize("kind", [REPLICA, ENGINE])
def test_who_is_served_by_a_dead_replica_is_told_so_and_nobody_else(
    server: Server, expected: list[str], kind: str
) -> None:
    """Kill one replica's process, then the engine process of another replica."""
    load = load_on(server)
    with load.going_on():
        wait_until(
            lambda: len({one.served_by for one in load.streams_in_flight()}) > 1, "both busy"
        )
        victim = psutil.Process(load.streams_in_flight()[0].served_by or 0)
        family = [victim, *victim.children(recursive=True)]
        (target,) = [victim] if kind == REPLICA else of_kind(family, ENGINE)
        wait_until(
            lambda: victim.pid in {one.served_by for one in load.streams_in_flight()},
            "the victim to be busy again",
        )
        killed = time.monotonic()
        target.send_signal(signal.SIGKILL)
        # A replica whose engine died notices that and exits; until then it still gets requests.
        wait_for_end([victim])
        gone = time.monotonic()
        wait_until(lambda: load.finished_after(gone) >= len(PROMPTS), "others served")

    failed = [one for one in load.asked if one.error is not None]
    assert [one for one in failed if one.is_stream and one.text]
    assert all(is_clean(one, kind) for one in failed), [one.error for one in failed]
    assert not [one for one in failed if one.served_by not in (None, victim.pid)]
    assert all(one.began < gone and one.ended > killed for one in failed)
    assert [one for one in load.asked if one.spans(killed) and one.error is None]
    for one in load.asked:
        assert one.error is not None or one.text == expected[one.prompt]

    wait_for_end(family)
    wait_until(lambda: len(of_kind(children(server), REPLICA)) == 2, "a new process")
    if kind == REPLICA:  # the new one answers
        wait_until(lambda: served_by_another(server, victim.pid), "a replica in its place")


def is_clean(one: Asked, kind: str) -> bool:
    """Return whether the error has OpenAI's form; a stream that has begun sends it as an event."""
    if isinstance(one.error, openai.APIStatusError):
        body = one.error.body
        known = (503,) if kind == REPLICA else (500, 503)  # vLLM's own for a dead engine
        return one.error.status_code in known and isinstance(body, dict) and "message" in body
    told = str(one.error)  # vLLM's, if it sees its engine die before the replica exits
    of_dead = REPLICA_DIED in told or ENGINE_DIED in told
    return one.is_stream and type(one.error) is openai.APIError and of_dead


def served_by_another(server: Server, dead: int) -> bool:
    """Return whether ten requests in a row are served by two replicas, of which none is dead."""
    seen = set()
    for _ in range(10):
        answer = server.client.completions.with_raw_response.create(
            model=MODEL, prompt=PROMPTS[0], max_tokens=1
        )
        seen.add(served_by(answer.headers))
    assert dead not in seen
    return len(seen) == 2
