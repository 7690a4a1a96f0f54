"""In a worker: watches the drafting code of either model runner, and writes down what it computes.

Works on eager models only: a compiled block or a captured graph calls no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.planning.step import Step
from vllm_dflash.tools.parity.recording import DraftStep, Recording


class RecordedDrafting:
    """Given to the worker of an engine that drafts with ours (`worker_extension_cls`)."""

    drafter: Any
    vllm_config: Any

    def record_drafting(self) -> None:
        """From now on write down all that is computed for drafts.

        Raises:
            ValueError: the engine is compiled, or takes more than one request at a time.
        """
        is_eager = self.vllm_config.model_config.enforce_eager
        if not is_eager or self.vllm_config.scheduler_config.max_num_seqs != 1:
            raise ValueError("record_drafting needs enforce_eager=True and max_num_seqs=1.")
        self._draft_recorder = DraftRecorder(self.drafter)

    def take_recording(self, path: str) -> None:
        """Stop, and write it to a file for `Recording.load`."""
        self._draft_recorder.finish(Path(path))


RECORDED = f"{RecordedDrafting.__module__}.{RecordedDrafting.__qualname__}"


class DraftRecorder:
    """Records one request at a time; rows of several in one batch could not be told apart."""

    def __init__(self, drafter: Any) -> None:
        """For our proposer (V1) or speculator (V2); recording starts here."""
        self._features: list[torch.Tensor] = []
        self._z: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._steps: list[DraftStep] = []
        self._newest: torch.Tensor | None = None
        """Features that were fused and are to be stored, [T, m * H]."""
        self._undo = ExitStack()
        model = drafter.model
        self._spec: DrafterSpec = drafter.spec
        self._wrap(model.context, "fuse", self._on_fuse)
        self._wrap(model.context, "store_fused", self._on_store)
        self._wrap(model.block, "forward", self._on_block)
        self._wrap(model, "compute_logits", self._on_logits)
        self._wrap(model, "compute_candidates", self._on_candidates)
        self._verified: DraftStep | None = None
        """Of V2, the block that the step which runs verifies: the next is drafted by the time that
        what became of it is known."""
        self._is_v2 = hasattr(drafter, "sample_draft")
        if self._is_v2:
            self._wrap(drafter, "observe_verification", self._on_grading)
            self._wrap(drafter, "sample_draft", self._on_drafts)
        else:
            self._wrap(drafter.block, "pick", lambda picked, *_: self._on_drafts(picked[0]))
        self._wrap(drafter.collect_statistics(), "observe_verification", self._on_verification)
        self._undo.enter_context(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        for layer in model.block.layers:
            self._undo.enter_context(layer.register_forward_hook(self._on_layer))

    def finish(self, path: Path) -> None:
        """Stop, and write everything to a file."""
        self._undo.close()
        if self._is_v2 and self._steps and self._steps[-1] is not self._verified:
            del self._steps[-1]  # drafted behind the last step, which nobody verifies
        spec = self._spec
        width = len(spec.taps) * spec.target_hidden_size
        recording = Recording(
            torch.cat(self._features) if self._features else torch.zeros(0, width),
            torch.cat(self._z) if self._z else torch.zeros(0, spec.hidden_size),
            torch.cat(self._positions) if self._positions else torch.zeros(0, dtype=torch.int64),
            self._steps,
        )
        recording.save(path)

    def _wrap(self, owner: Any, name: str, observe: Callable[..., None]) -> None:
        """Call `observe(result, *arguments)` after a method of an object."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Before the call: what is passed may be overwritten in it.
            kept = [_copy(value) if isinstance(value, torch.Tensor) else value for value in args]
            result = original(*args, **kwargs)
            observe(result, *kept, **kwargs)
            return result

        if name in vars(owner):
            self._undo.callback(setattr, owner, name, original)
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, wrapped)

    # --- context ------------------------------------------------------------------------------

    def _on_fuse(self, _: torch.Tensor, features: torch.Tensor) -> None:
        self._newest = features

    def _on_store(
        self, _: None, z: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> None:
        assert self._newest is not None
        stored = _copy(slots[0]) >= 0  # a slot of -1 is a row that was rejected
        self._features.append(self._newest[: len(z)][stored])
        self._z.append(z[stored])
        self._positions.append(positions[stored])

    # --- block --------------------------------------------------------------------------------

    def _on_model(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        self._steps.append(
            DraftStep(
                sum(map(len, self._positions)),
                input_ids=_copy(named["input_ids"]),
                positions=_copy(named["positions"]),
            )
        )

    def _on_layer(self, _: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, residual = output  # vLLM adds them up in the norm that comes next
        self._steps[-1].layers.append(_copy(x + residual))

    def _on_block(self, hidden: torch.Tensor, x: torch.Tensor, *_: torch.Tensor) -> None:
        self._steps[-1].embedding = x
        self._steps[-1].hidden = _copy(hidden)

    def _on_logits(self, logits: torch.Tensor, *_: Any) -> None:
        self._steps[-1].logits = _copy(logits)

    def _on_candidates(self, found: tuple[torch.Tensor, torch.Tensor], *_: Any) -> None:
        self._steps[-1].candidates, self._steps[-1].logits = map(_copy, found)

    def _on_drafts(self, drafts: torch.Tensor | list[int], *_: Any) -> None:
        self._steps[-1].drafts = _copy(torch.as_tensor(drafts))

    # --- verification -------------------------------------------------------------------------

    def _on_grading(self, *_: Any) -> None:
        self._verified = self._steps[-1] if self._steps else None

    def _on_verification(self, _: None, step: Step) -> None:
        """Of the one request."""
        block = self._verified if self._is_v2 else self._steps[-1]
        if step.verified[0] and block is not None:
            block.num_drafted = int(step.verified[0])
            block.num_accepted = int(step.accepted[0])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
