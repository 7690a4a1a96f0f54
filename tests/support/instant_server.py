"""A server that answers at once, in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from vllm_dflash.tools.server import Server
from vllm_dflash.tools.server_process import Facts


class InstantServer(Server):
    """Counts upwards from the last token of the prompt, or writes a script. Tokens are bytes."""

    def __init__(self, *script: bytes, **facts: Any) -> None:
        """Each part of the script is a step."""
        known: dict[str, Any] = {
            "drafter": None,
            "stop_tokens": [],
            "versions": {},
            "max_num_seqs": 99,
            "max_new_tokens": None,
        }
        self.facts = Facts(**{**known, "max_model_len": 999, **facts})  # type: ignore[typeddict-item]
        self.script = script
        self.asked: list[dict[str, Any]] = []
        """Bodies of the completions."""
        self.drafts = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> Facts:
        return self.facts

    def write(self, prompt: list[int], limit: int) -> list[int]:
        return [prompt[-1] + number for number in range(1, limit + 1)]

    def regret(self, best: int, scored: int) -> float:
        return float(best != scored)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        match path, body:
            case "/tokenize", {"prompt": text}:
                return {"tokens": [ord(letter) for letter in text]}
            case "/tokenize", {"messages": [{"content": text}], "chat_template_kwargs": {**more}}:
                assert not more
                return {"tokens": [ord(letter) for letter in f"<{text}>"]}
            case "/detokenize", {"tokens": [*tokens]}:
                return {"prompt": bytes(tokens).decode(errors="replace")}
            case "/v1/completions", {"prompt": [*prompt], "max_tokens": limit}:
                self.asked.append(asked := dict(body or {}))
                choice: dict[str, Any] = {"token_ids": self.write(prompt, limit)}
                self.drafts += 2
                for scored in asked.get("logprob_token_ids", ()):
                    best = prompt[-1] + 1
                    found = {best: 0.0, scored: -self.regret(best, scored)}
                    top = {f"token_id:{token}": value for token, value in found.items()}
                    choice["logprobs"] = {"top_logprobs": [top]}
                return {"choices": [choice]}
        raise KeyError(path)

    @contextmanager
    def answer(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        if path == "/metrics":
            counts = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 1}
            lines = [
                f"# TYPE vllm:spec_decode_num_{name}_total counter\n"
                f"vllm:spec_decode_num_{name}_total {per_draft * self.drafts}\n"
                for name, per_draft in counts.items()
            ]
        else:
            (choice,) = self.ask(path, body)["choices"]
            parts = [[*step] for step in self.script] or [choice["token_ids"]]
            events = [json.dumps({"choices": [{"token_ids": one}]}) for one in parts]
            lines = [f"data: {event}\n\n" for event in [*events, "[DONE]"]]
        yield io.BytesIO("".join(lines).encode())
