"""One engine of a batch run: an actor that Ray Data hands rows to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm_dflash.cluster.batches.parts import ID, check_claimed, write_part

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class Generator:
    """Generates for a batch, writes its part, and says what that took."""

    def __init__(
        self, engine: dict[str, Any], sampling: dict[str, Any], out: str, form: str, column: str
    ) -> None:
        """Start the engine, in this process: whatever ends the actor ends all of it.

        Args:
            engine: arguments of `vllm.LLM`.
            sampling: arguments of `vllm.SamplingParams`.
            out: folder of the parts.
            form: of the parts, "jsonl" or "parquet".
            column: where rows have their prompts.

        Raises:
            ValueError: `out` is not the folder of the run that this machine sees.
        """
        check_claimed(Path(out))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        self._llm = LLM(**engine, disable_log_stats=False)
        self._sampling = SamplingParams(**sampling)
        self._out, self._form, self._column = Path(out), form, column

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """`batch`: columns of the dataset. Returns one row: counts, and when it began and ended."""
        began, before = time.time(), self._counters()
        ids = [_plain(value) for value in batch[ID]]
        rows = self._generate(ids, [_plain(prompt) for prompt in batch[self._column]])
        write_part(self._out, rows, self._form)
        after = self._counters()
        summed = {
            "rows": len(rows),
            "refused": sum(row["error"] is not None for row in rows),
            "tokens": sum(row["tokens"] for row in rows),
            **{name: after[name] - before[name] for name in COUNTERS},
        }
        return {
            name: [value]
            for name, value in {**summed, "began": began, "ended": time.time()}.items()
        }

    def _generate(self, ids: list[Any], prompts: list[Any]) -> list[dict[str, Any]]:
        """A row of the output for each prompt; one that cannot be generated from has an error."""
        errors = [self._error_of(prompt) for prompt in prompts]
        good = [prompt for prompt, error in zip(prompts, errors, strict=True) if error is None]
        outputs = iter(self._llm.generate(good, self._sampling, use_tqdm=False))
        rows = []
        for row_id, prompt, error in zip(ids, prompts, errors, strict=True):
            row = {ID: row_id, "prompt": prompt if isinstance(prompt, str) else None}
            if error is None:
                answer = next(outputs).outputs[0]
                row |= {"text": answer.text, "tokens": len(answer.token_ids)}
                row |= {"finish_reason": answer.finish_reason, "error": None}
            else:
                row |= {"text": None, "tokens": 0, "finish_reason": None, "error": error}
            rows.append(row)
        return rows

    def _error_of(self, prompt: Any) -> str | None:
        """Why nothing can be generated from this prompt."""
        if prompt is None or prompt != prompt:  # in a column of numbers and nothing, it is NaN
            return "there is no prompt"
        if not isinstance(prompt, str):
            return f"the prompt is no text but {prompt!r}"
        limit = self._llm.llm_engine.model_config.max_model_len
        length = len(self._llm.get_tokenizer().encode(prompt))
        fits = 0 < length < limit
        return None if fits else f"{length} tokens; from 1 to {limit - 1} fit max_model_len {limit}"

    def _counters(self) -> dict[str, int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return {name: int(values.get(metric, 0)) for name, metric in COUNTERS.items()}


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numpy's numbers become Python's."""
    return value.item() if hasattr(value, "item") else value
