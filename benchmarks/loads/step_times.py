"""Times the parts of an engine's steps from inside its worker, for `--where`.

Works on CPUs only: on a GPU, a call returns when its work is launched, not when it is done.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_dflash.compatibility import check_vllm
from vllm_dflash.seams import Seam

TARGET, DRAFT, CONTEXT, PLANNING = "target", "draft", "context", "planning"
KINDS = ("decoding", "decoding, drafts", "prompts", "prompts, drafts")
"""Kinds of steps: with or without prompts (several rows of one), with or without drafts."""
OF_A_KIND = ("steps", "seconds", "rows", "drafts", "tokens")
"""What is summed per kind of step, under keys like "prompts: rows"."""
OF_THE_RUNNER = (
    ("_model_forward", TARGET),
    ("propose_draft_token_ids", DRAFT),
    ("_copy_draft_token_ids_to_cpu", DRAFT),
    ("take_draft_token_ids", DRAFT),
)
OF_VLLMS_DRAFTER = ("combine_hidden_states", "precompute_and_store_context_kv")
STEP_TIMES = tuple(
    Seam(f"vllm.v1.worker.gpu_model_runner:GPUModelRunner.{name}")
    for name in (*dict(OF_THE_RUNNER), "execute_model", "sample_tokens")
)
"""Methods of vLLM that are timed, with any arguments; `make seams` looks for them."""


class TimedSteps:
    """Worker extension (`worker_extension_cls`) for engines that run vLLM's V1 runner."""

    model_runner: Any

    def step_times(self) -> dict[str, float]:
        """Return sums since the first call: steps, seconds, tokens, drafts, and seconds per part.

        The rest of the time is the engine's: scheduling, input, sampling, output, and communication
        between processes.
        """
        if not hasattr(self, "_step_parts"):
            check_vllm(STEP_TIMES)
            self._step_parts = StepParts(self.model_runner, is_ours=hasattr(self, "dflash_stats"))
        return dict(self._step_parts.sums)


TIMED = f"{TimedSteps.__module__}.{TimedSteps.__qualname__}"


class StepParts:
    """Sums the time that calls take. Time in a nested part does not count for the outer one."""

    def __init__(self, runner: Any, *, is_ours: bool) -> None:
        names = (TARGET, DRAFT, "drafts", "steps", "tokens", "seconds")
        self.sums = dict.fromkeys(names, 0.0)
        self._inside: list[str] = []
        self._since = self._ended = time.perf_counter()
        for name, part in OF_THE_RUNNER:
            self._watch(runner, name, part)
        self._watch(runner.model, "compute_logits", TARGET)
        self.sums |= {f"{kind}: {what}": 0.0 for kind in KINDS for what in OF_A_KIND}
        self._kind, self._rows, self._drafts = KINDS[0], 0, 0
        self._watch_rows(runner)
        drafter = getattr(runner, "drafter", None)
        if is_ours:
            self._watch_own_parts(drafter)
        elif drafter is not None:
            for name in OF_VLLMS_DRAFTER:
                self._watch(drafter.model, name, CONTEXT)
        self._watch_ends(runner)

    def _watch(self, owner: Any, name: str, part: str) -> None:
        """Time a method of an object."""
        original = getattr(owner, name)
        self.sums.setdefault(part, 0.0)

        def timed(*arguments: Any, **named: Any) -> Any:
            if part == TARGET and self._inside:  # a drafter that uses the target's head
                return original(*arguments, **named)
            self.sums["drafts"] += name == "propose_draft_token_ids"
            self._add()
            self._inside.append(part)
            try:
                return original(*arguments, **named)
            finally:
                self._add()
                self._inside.pop()

        setattr(owner, name, timed)

    def _watch_own_parts(self, drafter: Any) -> None:
        """Time our drafter's `end_step`, and take context and planning times from its steps."""
        self._watch(drafter, "end_step", DRAFT)
        original = drafter.end_step
        self.sums |= {CONTEXT: 0.0, PLANNING: 0.0}

        def end_step() -> None:
            step = drafter.record
            original()
            if step is not None:
                self.sums[CONTEXT] += step.context_seconds
                self.sums[PLANNING] += step.planning_seconds
                self.sums[DRAFT] -= step.context_seconds + step.planning_seconds

        drafter.end_step = end_step

    def _watch_rows(self, runner: Any) -> None:
        """Determine the kind of each step."""
        original = runner.execute_model

        def execute_model(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            self._rows = scheduled.total_num_scheduled_tokens
            self._drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            more = self._rows > len(scheduled.num_scheduled_tokens) + self._drafts
            self._kind = KINDS[2 * more + (self._drafts > 0)]
            if not scheduled.scheduled_cached_reqs.req_ids:  # the engine was idle until now
                self._ended = time.perf_counter()
            return original(scheduled, *arguments, **named)

        runner.execute_model = execute_model

    def _watch_ends(self, runner: Any) -> None:
        """Time steps from the end of one to the end of the next; a step ends with its sampling."""
        original = runner.sample_tokens

        def sample_tokens(*arguments: Any, **named: Any) -> Any:
            output = original(*arguments, **named)
            now = time.perf_counter()
            tokens, seconds = sum(map(len, output.sampled_token_ids)), now - self._ended
            step = dict(zip(OF_A_KIND, (1, seconds, self._rows, self._drafts, tokens), strict=True))
            for what, value in step.items():
                self.sums[f"{self._kind}: {what}"] += value
            for what in ("steps", "seconds", "tokens"):
                self.sums[what] += step[what]
            self._ended = now
            return output

        runner.sample_tokens = sample_tokens

    def _add(self) -> None:
        """Add the time since the last change to the part that ran."""
        now = time.perf_counter()
        if self._inside:
            self.sums[self._inside[-1]] += now - self._since
        self._since = now
