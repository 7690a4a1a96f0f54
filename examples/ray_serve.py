"""Several engines with DFlash behind one OpenAI-compatible route, with Ray Serve.

    scripts/run.sh python examples/ray_serve.py                     # the demo pair, two replicas
    scripts/run.sh python examples/client.py                        # from another terminal
    scripts/run.sh python examples/ray_serve.py --replicas 4 --min-replicas 1 \\
        --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 -- --dtype bfloat16
    PYTHONPATH=$PWD/examples scripts/run.sh serve run ray_serve:app max_replicas=2

Ctrl-C ends all of it. docs/ray_serve.md says what happens when a replica dies.
"""

import argparse
import signal
import threading
from typing import TYPE_CHECKING

from rich.console import Console

from ray_engines.local_ray import local_ray
from ray_engines.replica_settings import Settings
from vllm_dflash.tools.arguments import not_negative, positive

if TYPE_CHECKING:
    from ray.serve import Application

APPLICATION = "vllm-dflash"


def app(settings: Settings) -> "Application":
    """Build the application for `serve run`, from the `key=value` of its command line."""
    from ray_engines.application import build

    return build(settings)


def parse() -> argparse.Namespace:
    """Parse the command line: fields of `Settings`, and where to serve."""
    demo = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=demo.model, help="the target: folder or repository")
    add("--drafter", default=demo.drafter, help="folder or repository; '' serves without DFlash")
    add("--served-model-name", default=demo.served_model_name)
    add("--max-model-len", type=positive, default=demo.max_model_len)
    add("--replicas", dest="max_replicas", type=positive, default=demo.max_replicas,
        metavar="REPLICAS", help="engines, at most")  # fmt: skip
    add("--min-replicas", type=positive, help="fewer than --replicas: scale by load")
    add("--ongoing-requests", type=positive, default=int(demo.ongoing_requests), metavar="N",
        help="requests in flight per replica that scaling aims at")  # fmt: skip
    add("--upscale-delay", dest="upscale_delay_s", type=not_negative,
        default=demo.upscale_delay_s, metavar="SECONDS")  # fmt: skip
    add("--downscale-delay", dest="downscale_delay_s", type=not_negative,
        default=demo.downscale_delay_s, metavar="SECONDS")  # fmt: skip
    add("--health-timeout", dest="health_check_timeout_s", type=positive,
        default=int(demo.health_check_timeout_s), metavar="SECONDS",
        help="an engine silent for three times as long is replaced")  # fmt: skip
    add("--finish-within", dest="graceful_shutdown_timeout_s", type=positive,
        default=int(demo.graceful_shutdown_timeout_s), metavar="SECONDS",
        help="for the requests of a replica that is to leave")  # fmt: skip
    add("--threads", type=positive, help="of each engine; default: the cores, shared")
    add("--gpus", type=int, default=0, help="of each engine")
    add("--host", default="127.0.0.1")
    add("--port", type=positive, default=8000)
    add("--address", help="of a Ray cluster; default: a Ray of its own on this machine")
    add("vllm_arguments", nargs="*", help="behind --: more arguments of vllm serve")
    return parser.parse_args()


def main() -> None:
    """Serve until Ctrl-C."""
    given = parse()
    given.min_replicas = given.min_replicas or given.max_replicas
    wanted = {name: value for name, value in vars(given).items() if name in Settings.model_fields}
    settings = Settings(**wanted)
    console, ended = Console(), threading.Event()
    with local_ray(address=given.address):
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which has handlers of its own
            signal.signal(number, lambda *_: _end(ended))
        from ray import serve

        try:
            serve.start(http_options={"host": given.host, "port": given.port})
            with console.status(f"Starting {settings.min_replicas} engines"):
                serve.run(app(settings), name=APPLICATION)
            url = f"http://{given.host}:{given.port}/v1"
            console.print(f"Serving {settings.served_model_name} at {url}. Ctrl-C ends it.")
            ended.wait()
        except KeyboardInterrupt:
            pass
        finally:
            console.print("Ending the engines.")
            if given.address:  # others may have applications in that cluster
                serve.delete(APPLICATION)
            else:
                serve.shutdown()


def _end(ended: threading.Event) -> None:
    """Set the event and raise, once. While engines still start, nothing waits for the event."""
    if not ended.is_set():
        ended.set()
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
