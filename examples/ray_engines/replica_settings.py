"""Settings for users of `examples/ray_serve.py`."""

from __future__ import annotations

import os
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ray_engines.local_ray import engine_environment, threads_of_each
from vllm_dflash.tools.demo_files import INSTALLED


class Settings(BaseModel):
    """Settings of one application. Values may be strings, as `serve run` passes `key=value`."""

    model_config = ConfigDict(extra="forbid")

    model: str = str(INSTALLED / "target")
    drafter: str | None = str(INSTALLED / "drafter")
    """None or empty: run without DFlash."""
    served_model_name: str = "demo"
    max_model_len: PositiveInt = 1024
    min_replicas: PositiveInt = 2
    max_replicas: PositiveInt = 2
    """If above `min_replicas`, Serve scales with the number of requests in flight."""
    ongoing_requests: PositiveFloat = 16.0
    """Target of scaling: requests in flight per replica."""
    max_ongoing_requests: PositiveInt = 256
    """Most requests in a replica at a time (its engine queues them); others wait for a replica."""
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    threads: PositiveInt | None = None
    """Threads per replica's engine. None: the machine's cores divided by `max_replicas`."""
    gpus: NonNegativeInt = 0
    """GPUs per replica; must match `--tensor-parallel-size`."""
    health_check_period_s: PositiveFloat = 2.0
    health_check_timeout_s: PositiveFloat = 30.0
    """An engine that fails to answer within this time, three times in a row, is replaced. Engines
    answer between steps."""
    graceful_shutdown_timeout_s: PositiveFloat = 60.0
    """How long a replica that is removed, by scaling or shutdown, may take to finish its
    requests."""
    vllm_arguments: tuple[str, ...] = ()
    """Additional arguments for `vllm serve`."""

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}:"
                " raise max_replicas or lower min_replicas"
            )
        return self

    @property
    def num_threads(self) -> int:
        """Threads per engine."""
        return self.threads or threads_of_each(self.max_replicas)

    @property
    def num_cpus(self) -> float:
        """CPUs that Ray counts per replica: a fraction if there are more replicas than cores."""
        return min(self.num_threads, (os.cpu_count() or 1) / self.max_replicas)

    def serve_arguments(self) -> list[str]:
        """The arguments of `vllm serve` equivalent to one replica."""
        arguments = [self.model, "--served-model-name", self.served_model_name]
        arguments += ["--max-model-len", str(self.max_model_len)]
        if self.drafter:
            arguments += ["--speculative-config.method", "dflash"]
            arguments += ["--speculative-config.model", self.drafter]
        return [*arguments, *self.vllm_arguments]

    def environment(self) -> dict[str, str]:
        """Environment variables of a replica's processes."""
        method = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        return engine_environment(self.num_threads) | method

    def deployment_options(self) -> dict[str, Any]:
        """Options of the Serve deployment."""
        actor = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.gpus,
            "runtime_env": {"env_vars": self.environment()},
        }
        names = "max_ongoing_requests health_check_period_s health_check_timeout_s"
        names += " graceful_shutdown_timeout_s"
        options = self.model_dump(include={*names.split()}) | {"ray_actor_options": actor}
        if self.min_replicas == self.max_replicas:
            return options | {"num_replicas": self.max_replicas}
        names = "min_replicas max_replicas upscale_delay_s downscale_delay_s"
        scaling = self.model_dump(include={*names.split()})
        scaling["target_ongoing_requests"] = self.ongoing_requests
        return options | {"autoscaling_config": scaling}
