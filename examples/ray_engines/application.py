"""The Ray Serve application: each replica is one engine with vLLM's own OpenAI server.

A replica's ASGI app is the one `vllm serve` runs, with all its routes. Serve's proxy distributes
requests over the replicas.
"""

from __future__ import annotations

import asyncio
import os
import socket
from argparse import Namespace
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ray import serve

from ray_engines.client_errors import App, Message, Receive, Send
from ray_engines.guard import Guard
from ray_engines.replica_settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application

SECONDS_BETWEEN_LOOKS = 0.05


def build(settings: Settings) -> Application:
    """Build the application for `serve.run`; the `serve run` command calls this, too.

    Raises:
        ValueError: vLLM does not know one of `vllm_arguments`.
    """
    read_arguments(settings.serve_arguments())
    replicas: Any = Replica  # a Deployment, since it is decorated
    return replicas.options(**settings.deployment_options()).bind(settings.serve_arguments())


def read_arguments(arguments: list[str]) -> Namespace:
    """Parse arguments as `vllm serve` does. Raises `ValueError` if it would print its usage."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ray_engines.serve_arguments import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as error:
        raise ValueError(f"vllm serve does not take these arguments: {arguments}") from error
    parsed.model = parsed.model_tag
    validate_parsed_serve_args(parsed)
    return parsed


@serve.deployment(name="vllm")
@serve.ingress()
class Replica:
    """One engine with its server."""

    def __init__(self, arguments: list[str]) -> None:
        self._guard = Guard()
        self._arguments = read_arguments(arguments)
        self._resources = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> App:
        """Start the engine and return its app; Serve calls this before any request."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        self._engine = await self._resources.enter_async_context(
            build_async_engine_client(self._arguments)
        )
        tasks = await self._engine.get_supported_tasks()
        app = build_app(self._arguments, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, self._arguments, tasks)
        app.state.server = Namespace()  # in place of uvicorn's, which vLLM would tell to exit
        self._watch = asyncio.create_task(self._leave_with_the_engine())
        return signed(app, f"{socket.gethostname()}/{os.getpid()}")

    async def check_health(self) -> None:
        """Serve calls this every `health_check_period_s`; it does not return if the engine hangs.

        It asks the engine's own process; vLLM's `check_health` only tells whether that died.
        """
        await self._engine.is_sleeping()

    async def _leave_with_the_engine(self) -> None:
        """Exit the process when the engine dies.

        Otherwise the replica would fail requests faster than others serve them, and so be sent more
        of them, until Serve's next health check. Once the process is gone, the proxy sends requests
        elsewhere and tells the clients of those in flight what happened.
        """
        while not self._engine.errored:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    async def __del__(self) -> None:
        """End the engine; Serve calls this when it removes the replica."""
        if watch := getattr(self, "_watch", None):
            watch.cancel()
        await self._resources.aclose()
        self._guard.dismiss()


def signed(app: App, name: str) -> App:
    """ASGI middleware that adds `name` (host/process id) to responses as `x-served-by`."""

    async def signed_app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def send_signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                signature = (b"x-served-by", name.encode())
                message["headers"] = [*message.get("headers", ()), signature]
            await send(message)

        await app(scope, receive, send_signed)

    return signed_app
