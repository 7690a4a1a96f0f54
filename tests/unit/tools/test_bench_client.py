"""The client of `vllm bench serve` in our process, and a server that is made up here."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from support import DEMO
from vllm_dflash.tools.bench.bench_runs import Cell, measure, read_early
from vllm_dflash.tools.server import EngineDied, Server

TOKENS = 3


class StreamingServer(Server):
    """Streams some tokens to each request, or refuses them all. Time passes with each."""

    def __init__(self, port: int) -> None:
        self._port, self.facts = port, {"cache_tokens": 99}  # type: ignore[typeddict-item]
        self.asked: list[dict[str, Any]] = []
        self.refusal = ""
        self.died: Path | None = None

    def ask(self, path: str, body: Any = None) -> Any:
        if self.died is not None:
            raise EngineDied(self.died)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamingServer]:
    known: StreamingServer
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "elsewhere")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # its metrics
            counts: dict[str, float] = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 2}
            metrics = {f"spec_decode_num_{name}_total": n for name, n in counts.items()}
            time = "request_time_per_output_token_seconds"
            metrics |= {"num_preemptions_total": 1, f"{time}_sum": 0.5, f"{time}_count": 2}
            lines = [f"vllm:{name} {n * len(known.asked)}\n" for name, n in metrics.items()]
            self.answer("".join(lines).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known.asked.append(json.loads(body))
            if known.refusal:
                self.send_error(400, known.refusal)
                return
            chunks: list[Any] = [{"choices": [{"text": f" {n}"}]} for n in range(TOKENS)]
            chunks.append({"choices": [], "usage": {"completion_tokens": TOKENS}})
            events = [*map(json.dumps, chunks), "[DONE]"]
            self.answer("".join(f"data: {event}\n\n" for event in events).encode())

        def answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        known = StreamingServer(http.server_address[1])
        yield known
        http.shutdown()


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(20)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]
    flags += ["--num-prompts", "5", "--output-len", str(TOKENS), "--temperature", "0.5"]
    return Cell("texts", 2, (*flags, "--model", str(DEMO / "target"), "--ignore-eos"))


def test_rounds_differ_and_sides_do_not(
    server: StreamingServer, cell: Cell, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several measurements in one process, each with vLLM's own result."""
    sent = []
    for number, seed in enumerate((0, 0, 1)):
        server.asked.clear()
        file = tmp_path / "raw" / f"{number}.json"
        result = measure(server, cell, seed, file)
        assert (result["completed"], result["failed"]) == (5, 0)
        assert result["total_output_tokens"] == 5 * TOKENS
        assert result["output_throughput"] > 0
        assert result["spec_decode_num_drafts"] == 5
        assert (result["step_seconds"], result["preemptions"]) == (0.25, 5)
        assert result["cache_tokens"] == 99
        assert result["spec_decode_acceptance_length"] == 3.0
        assert len(result["itls"]) == 5
        assert json.loads(file.read_text())["output_lens"] == result["output_lens"]
        sent.append(sorted(one["prompt"] for one in server.asked))
        for one in server.asked:
            assert one["max_tokens"] == TOKENS
            assert one["temperature"] == 0.5
            assert one["ignore_eos"]
    assert sent[0] == sent[1] != sent[2]
    assert os.environ["no_proxy"] == "elsewhere,127.0.0.1"
    assert capfd.readouterr().out == ""
    assert "Serving Benchmark Result" in (tmp_path / "raw" / "client.log").read_text()


def test_a_refused_request_ends_the_measurement(
    server: StreamingServer, cell: Cell, tmp_path: Path
) -> None:
    """Throughput of the others would be that of a smaller load."""
    server.refusal = "too long"
    with pytest.raises(ValueError, match=r"5 requests of texts, concurrency 2 failed.*too long"):
        measure(server, cell, 0, tmp_path / "result.json")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_dead_server_is_said_to_be_dead(
    server: StreamingServer, cell: Cell, tmp_path: Path, is_there: bool
) -> None:
    server.refusal, server.log = "odd", tmp_path / "log"
    server.log.write_text("RuntimeError: it broke")
    server.died = server.log
    server._port = server._port if is_there else 9
    with pytest.raises(EngineDied, match="it broke"):
        measure(server, cell, 0, tmp_path / "result.json")


def test_prompts_are_read_before_servers_start(cell: Cell, tmp_path: Path) -> None:
    flags = cell.flags
    named = [*flags[: flags.index("--model")], "--model", "nowhere", "--tokenizer"]
    read_early(replace(cell, flags=(*named, str(DEMO / "target"))))
    (tmp_path / "prompts.jsonl").write_text('{"text": "a prompt by another name"}')
    with pytest.raises(ValueError, match=r"vLLM cannot read custom from .*'prompt' column"):
        read_early(cell)
