"""Compares engines under more loads than `vllm-dflash bench` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from loads.texts import long_texts
from loads.workload import SHORT, LoadsWorkload
from vllm_dflash.tools.bench.bench_plan import Measurement
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.sides import PLAIN
from vllm_dflash.tools.engine_answers import Facts


@dataclass
class LoadsComparison(Comparison):
    """Runs any of the loads on every side of a record, and measures where their time goes."""

    workload: LoadsWorkload
    _contexts: list[Measurement] = field(default_factory=list, init=False)
    _plain_rates: dict[int, float] = field(default_factory=dict, init=False)
    """Plain decoding's tokens per second by concurrency."""
    _served_rates: dict[int, float] = field(default_factory=dict, init=False)
    """The same for short answers, including the time for their prompts."""

    def _prepare(self, facts: Sequence[Facts]) -> None:
        self._contexts = self._plan_contexts(min(one["cache_tokens"] for one in facts))
        super()._prepare(facts)
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
