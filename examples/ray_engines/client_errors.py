"""Errors in OpenAI's format for clients whose replica dies.

Serve's proxy does not know that format. If a replica dies before its response has begun, uvicorn
sends "Internal Server Error"; a stream just breaks off, as it does when the network fails.
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

REPLICA_DIED = "the replica that served this request died; send the request again"
PROXYS_ERRORS = (408, 429, 503)
"""Statuses that the proxy sends as plain text; those of a replica are JSON already."""


def proxy_middlewares() -> list[Any]:
    """Middlewares for Serve's proxy to run around every request.

    Ray finds this function by `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`, set when Ray starts.
    """
    from starlette.middleware import Middleware

    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """ASGI middleware: every request gets a response, and the proxy's own errors become JSON.

    - No response has begun: send 503, which clients retry.
    - A stream of events broke off: send an event with the error, then `[DONE]`, as vLLM does.
    - Another body broke off: nothing can be added to it; uvicorn closes the connection.
    - The proxy's own errors: send the same message as JSON.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on and watch how its response ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        is_held = is_stream = is_finished = False

        async def watch(message: Message) -> None:
            nonlocal start, is_held, is_stream, is_finished
            if message["type"] == "http.response.start":
                start = message
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                is_stream = kind.startswith(b"text/event-stream")
                is_held = message["status"] in PROXYS_ERRORS and kind.startswith(b"text/plain")
                if is_held:  # until its message is known
                    return
            else:
                is_finished = not message.get("more_body", False)
            if start is not None and is_held:
                is_held = False
                words = message.get("body", b"").decode(errors="replace")
                await _send_error(send, words, start["status"], start["headers"])
            else:
                await send(message)

        await self._app(scope, receive, watch)
        if start is None:
            await _send_error(send, REPLICA_DIED, HTTPStatus.SERVICE_UNAVAILABLE)
        elif is_stream and not is_finished:
            error = _error_body(REPLICA_DIED, HTTPStatus.SERVICE_UNAVAILABLE)
            last = b"data: " + error + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _error_body(message: str, status: int) -> bytes:
    """An error as JSON, in the form that vLLM's server uses."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


async def _send_error(
    send: Send, message: str, status: int, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a complete error response. `headers`: those of the response that it replaces."""
    body = _error_body(message, status)
    own = {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
    kept = [(name, value) for name, value in headers or () if name not in own]
    start = {"type": "http.response.start", "status": int(status)}
    await send(start | {"headers": [*own.items(), *kept]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
