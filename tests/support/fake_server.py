"""Replaces `vllm serve` in the process of a `Server`: no vLLM, but what can go wrong with it.

A token is a byte. Texts count upwards, two tokens a step, and 9 ends them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_dflash.tools import server_process

FACTS = {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 4, "max_new_tokens": None}
FACTS |= {
    "drafter": None,
    "stop_tokens": [9],
    "versions": {"vllm": "of today"},
    "has_chat_template": True,
}
METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 5.0
vllm:spec_decode_num_drafts_total{engine="1"} 2.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 3.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
"""
ROOT_CAUSE = "(VllmWorker-0 pid=7) ERROR 11-21 09:10:00 [mp.py:8] weights.LoadError: too short"
TOO_LONG = 50
"""Tokens of a prompt that is refused."""
BREAKS = 8
"""A prompt whose stream ends with an error."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/health":
                self.say("")
            case server_process.FACTS_PATH:
                self.say(FACTS | {"flags": sys.argv[1:], "mark": os.environ.get("MARK")})
            case "/metrics":
                self.say(METRICS)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path, asked:
            case "/tokenize", {"prompt": text}:
                self.say({"tokens": [*text.encode()]})
            case "/tokenize", {"messages": [{"content": text}], "chat_template_kwargs": more}:
                self.say({"tokens": [*f"<{text}{json.dumps(more)}>".encode()]})
            case "/detokenize", {"tokens": tokens}:
                self.say({"prompt": bytes(tokens).decode()})
            case "/v1/completions", {"prompt": [*prompt]} if len(prompt) >= TOO_LONG:
                self.say({"error": {"message": "the prompt is too long"}}, 400)
            case "/v1/completions", {"prompt": [0]}:
                print(ROOT_CAUSE, flush=True)
                print("RuntimeError: Engine core initialization failed.", flush=True)
                os._exit(1)
            case "/v1/completions", _:
                self.complete(asked)

    def complete(self, asked: dict[str, Any]) -> None:
        assert asked["temperature"] == 0
        assert asked["repetition_penalty"] == 1  # whatever the target's default is
        assert asked["return_token_ids"]
        first = asked["prompt"][-1] + 1
        tokens = [*range(first, min(first + asked["max_tokens"], 10))]
        if asked.get("stream") and asked["prompt"] == [BREAKS]:
            self.say(f"data: {json.dumps({'error': {'message': 'the stream broke'}})}\n\n")
        elif asked.get("stream"):
            steps = [tokens[start : start + 2] for start in range(0, len(tokens), 2)]
            events = [json.dumps({"choices": [{"token_ids": one}]}) for one in steps]
            self.say("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))
        else:
            self.answer_at_once(asked, first, tokens)

    def answer_at_once(self, asked: dict[str, Any], first: int, tokens: list[int]) -> None:
        choice: dict[str, Any] = {"token_ids": tokens}
        for scored in asked.get("logprob_token_ids", ()):
            assert asked["return_tokens_as_token_ids"]
            top = {f"token_id:{first}": -0.5, f"token_id:{scored}": -0.5 - abs(scored - first)}
            choice["logprobs"] = {"top_logprobs": [top]}
        time.sleep(0.01 * (10 - first))  # the first ones take longest
        self.say({"choices": [choice]})

    def say(self, answer: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def stay() -> None:
    """Outlive everything but SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def main() -> None:
    _, serve, model, *flags = sys.argv
    assert serve == "serve"
    print("serving", flush=True)
    if model == "refused":
        raise ValueError("the pair\ndoes not fit")
    if model == "dead":
        print("last words")
        sys.exit(3)
    if model == "stubborn":
        multiprocessing.get_context("fork").Process(target=stay).start()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(os.environ["MARK"]).touch()
        time.sleep(600)
    port = int(flags[flags.index("--port") + 1])
    server = ThreadingHTTPServer((flags[flags.index("--host") + 1], port), Handler)
    signal.signal(
        signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start()
    )
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    server_process.SECONDS_TO_STOP = 0.5
    server_process.run(main)
