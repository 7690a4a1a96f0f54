"""What a client is told when the replica that serves it dies, in OpenAI's form of an error.

Serve's proxy knows nothing of that form: where a replica dies before its answer has begun, uvicorn
says "Internal Server Error"; a stream just breaks off, as it also does where a network fails.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PROXY_CALLBACK = "vllm_dflash.cluster.replicas.client_errors.proxy_middlewares"
"""For `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`, where Ray itself is started."""
REPLICA_DIED = "the replica that served this request died; send the request again"


def proxy_middlewares() -> list[Any]:
    """What Serve's proxy is to run around every request."""
    from starlette.middleware import Middleware

    return [Middleware(OpenAIErrors)]


def error_body(message: str, status: int) -> bytes:
    """JSON as vLLM's server writes it."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


class OpenAIErrors:
    """ASGI middleware: every request ends in an answer, and the proxy's own errors are JSON.

    - No answer has begun: 503, which clients know as worth another try.
    - A stream of events broke off: one more event with the error, then `[DONE]`, as vLLM ends one.
    - Another body broke off: nothing can be added to it; uvicorn closes the connection.
    - 408, 429 and 503 of the proxy's own (in plain text): the same words as JSON.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on and watch how its answer ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        await answer.finish()


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._finished = self._is_stream = False
        self._rewriting: Message | None = None
        """The start of an error of the proxy's own, held back until its body is known."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if message["status"] in (408, 429, 503) and kind.startswith(b"text/plain"):
                self._rewriting = message
                return
        elif message["type"] == "http.response.body":
            self._finished = not message.get("more_body", False)
            if self._rewriting is not None:
                start, self._rewriting = self._rewriting, None
                text = message.get("body", b"").decode(errors="replace")
                kept = [
                    (name, value)
                    for name, value in start["headers"]
                    if name not in (b"content-type", b"content-length")
                ]
                await self._error(text, start["status"], kept)
                return
        await self._send(message)

    async def finish(self) -> None:
        """Say what the one who answered could not say any more."""
        if not self._begun:
            await self._error(REPLICA_DIED, HTTPStatus.SERVICE_UNAVAILABLE)
        elif self._is_stream and not self._finished:
            event = b"data: " + error_body(REPLICA_DIED, HTTPStatus.SERVICE_UNAVAILABLE)
            event += b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _error(
        self, text: str, status: int, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        body = error_body(text, status)
        about = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        start = {"type": "http.response.start", "status": int(status)}
        await self._send(start | {"headers": about + (headers or [])})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
