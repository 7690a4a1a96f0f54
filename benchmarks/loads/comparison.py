"""Compares engines under more loads than `vllm-dflash bench` has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from loads.texts import long_texts
from loads.workload import SHORT, LoadsWorkload
from vllm_dflash.tools.bench.bench_plan import CLOSED, Measurement
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLAIN, Side
from vllm_dflash.tools.engine_answers import Facts

CALIBRATION_SECONDS = 2.0
CALIBRATION_WINDOWS = 2
"""Only the last window counts; kernels are prepared before it."""
SCHEDULE = "native schedule"
"""Side of vLLM's own DFlash with a draft length for each batch size."""


def tuned_schedule(drafter: str, rates: Mapping[int, Mapping[int, float]]) -> Side:
    """Make a side of native DFlash with vLLM's schedule: the fastest K per number of requests.

    `rates`: tokens per second by number of requests and K; K = 0 is plain decoding. A K holds from
    its number of requests up to the next; vLLM uses the last K for all larger numbers.
    """
    counts = sorted(rates)
    lasts = [*(following - 1 for following in counts[1:]), counts[-1]]
    fastest = [max(rates[count], key=rates[count].__getitem__) for count in counts]
    ranges = zip([1, *counts[1:]], lasts, fastest, strict=True)
    config = {
        "method": "dflash",
        "model": drafter,
        "num_speculative_tokens": max(rates[counts[0]]),
        "num_speculative_tokens_per_batch_size": [[*one] for one in ranges],
    }
    return Side(SCHEDULE, "native schedule", NO_PLUGIN, config)


@dataclass
class LoadsComparison(Comparison):
    """Runs any of the loads on every side of a record, and measures where their time goes."""

    workload: LoadsWorkload
    tune_schedule: bool = False
    """Whether to add a side with vLLM's own schedule, tuned by measuring its fixed K here."""
    _contexts: list[Measurement] = field(default_factory=list, init=False)
    _plain_rates: dict[int, float] = field(default_factory=dict, init=False)
    """Plain decoding's tokens per second by concurrency."""
    _served_rates: dict[int, float] = field(default_factory=dict, init=False)
    """The same for short answers, including the time for their prompts."""

    @property
    def all_prompts(self) -> list[str]:
        """Prompts of all files."""
        return [*chain(*self.prompts.values())]

    def _prepare(self, facts: Sequence[Facts]) -> None:
        self._contexts = self._plan_contexts(min(one["cache_tokens"] for one in facts))
        super()._prepare(facts)
        if self.tune_schedule:
            self._add_tuned_schedule()
        plain = [side for side in self.record.sides if side.name == PLAIN]
        rates = self._calibrate(self.workload.calibrated, plain)
        self._plain_rates = {count: by_name[PLAIN] for count, by_name in rates.items()}
        nothing_yet = dict.fromkeys(self.workload.served, 0.0)
        short = self.workload.plan_short(self.all_prompts, "calibration", nothing_yet)
        rates = self._rates(short, plain)
        self._served_rates = {count: by_name[PLAIN] for count, by_name in rates.items()}
        self.record.about["plain_tokens_per_second_at"] = self._plain_rates
        self.record.about["plain_short_tokens_per_second_at"] = self._served_rates

    def _plan_loads(self, number: int) -> list[Measurement]:
        plan = self.workload.plan_round(self.prompts, number, self._plain_rates, self._served_rates)
        return plan + self._contexts

    def _finish(self) -> None:
        """Measure where the time goes; last, since it leaves timers in the engines."""
        if not self.workload.where:
            return
        plan = self._contexts or self.workload.plan_decoding(self.all_prompts)
        if SHORT in self.workload.loads:  # includes prompts, unlike the others
            plan = self.workload.plan_short(self.all_prompts, "where", self._served_rates)
        plan = [replace(one, question="where") for one in plan]
        self.record.where += self._measure("where the time goes", plan, self.record.sides)
        self.record.write(self.out)

    @property
    def _more_time(self) -> str:
        if not self.workload.contexts:
            return super()._more_time
        tokens = max(self.workload.contexts) * max(self.workload.concurrency)
        return f", plus the time each engine takes to read prompts of {tokens:,} tokens"

    def _plan_contexts(self, room: int) -> list[Measurement]:
        """Plan the contexts that fit the caches. Raises ValueError if none of them does."""
        if not self.workload.contexts:
            return []
        texts = long_texts(self.all_prompts, max(self.workload.concurrency))
        tokens = self.engines.ask(PLAIN, "encode", texts=texts)
        plan = self.workload.plan_contexts(tokens, room)
        without = len(self.workload.contexts) * len(self.workload.concurrency) - len(plan)
        words = (
            f"the engines' caches hold {room:,} tokens each; raise VLLM_CPU_KVCACHE_SPACE (GiB) on"
            " a CPU, or --gpu-memory-utilization on a GPU"
        )
        if not plan:
            raise ValueError(f"there is no room for any of the contexts: {words}.")
        if without:
            self.progress.say(f"{without} settings are left out: {words}")
        return plan

    def _names(self) -> list[str]:
        return [*super()._names(), *[SCHEDULE] * self.tune_schedule]

    def _add_tuned_schedule(self) -> None:
        """Add vLLM's own schedule, of the K that are fastest in short windows, as a side."""
        sides = self.record.sides
        lengths = {PLAIN: 0}
        lengths |= {one.name: one.draft_tokens or 0 for one in sides if one.kind == "native"}
        calibrated = [side for side in sides if side.name in lengths]
        rates = {
            count: {lengths[name]: rate for name, rate in by_name.items()}
            for count, by_name in self._calibrate(self.workload.concurrency, calibrated).items()
        }
        config = calibrated[-1].speculative_config or {}
        schedule = tuned_schedule(config["model"], rates)
        sides.insert(len(calibrated), schedule)
        self.progress.say(f"{SCHEDULE}: {schedule.speculative_config}")
        self.engines.start([schedule], self.progress)

    def _calibrate(
        self, counts: Iterable[int], sides: Sequence[Side]
    ) -> dict[int, dict[str, float]]:
        """Estimate tokens per second of the closed load, by concurrency and by name of side."""
        short = replace(
            self.workload,
            concurrency=tuple(sorted({*counts})),
            seconds=min(CALIBRATION_SECONDS, self.workload.seconds),
        )
        return self._rates(short.plan_closed(CLOSED, self.all_prompts), sides)

    def _rates(
        self, plan: Sequence[Measurement], sides: Sequence[Side]
    ) -> dict[int, dict[str, float]]:
        """Measure tokens per second of a plan, by setting and by name of side."""
        rates: dict[int, dict[str, float]] = defaultdict(dict)
        for _ in range(CALIBRATION_WINDOWS if plan else 0):
            for one in self._measure("calibrating", plan, sides):
                rates[one["setting"]][one["side"]] = one["result"]["tokens_per_second"]
        return rates
