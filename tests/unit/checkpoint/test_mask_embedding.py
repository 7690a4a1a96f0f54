"""`mask_embedding.pt`: a tensor and nothing else, for this drafter's mask token."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from support.pairs import drafter_config
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.checkpoint.tensors import parse_mask_embedding

SPEC = parse_config("it", drafter_config())  # mask token 300, 64 wide
NUMBERS = torch.arange(64.0)


class Called:
    """An object whose pickle calls a function, as any pickle may."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("called",)


def stored(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "state",
    [
        NUMBERS,
        NUMBERS.reshape(1, 64),
        {"embedding": NUMBERS},
        {"embedding": NUMBERS.reshape(1, 1, 64), "mask_token_id": 300},
    ],
)
def test_an_embedding_is_a_row(state: Any) -> None:
    assert torch.equal(parse_mask_embedding(SPEC, stored(state)), NUMBERS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (stored({"embedding": NUMBERS, "mask_token_id": 4}), "is for mask_token_id 4, .* says 300"),
        (stored({"embedding": NUMBERS, "mask_token_id": None}), "is for mask_token_id None"),
        (stored({"weight": NUMBERS}), "holds a NoneType, not a tensor"),
        (stored([NUMBERS]), "holds a list, not a tensor"),
        (stored(NUMBERS[:-1].clone()), "has 63 numbers, hidden_size is 64"),
        # 4 bytes that claim to be 4 TiB.
        (stored(torch.zeros(1).expand(1 << 40)), "has 1099511627776 numbers"),
        (b"", "cannot be read as plain tensors: EOFError|Ran out"),
        (b"nonsense", "cannot be read as plain tensors: "),
    ],
)
def test_anything_else_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(DrafterError, match=rf"^drafter 'it': mask_embedding\.pt ({why}).*\.$"):
        parse_mask_embedding(SPEC, content)


@pytest.mark.parametrize("is_forced", [False, True])
def test_no_code_is_run_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_forced: bool
) -> None:
    if is_forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(DrafterError, match="cannot be read as plain tensors: Weights only"):
        parse_mask_embedding(SPEC, stored(Called()))
    assert capsys.readouterr().out == ""


def test_one_stored_from_a_gpu_is_read_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    content = stored(NUMBERS)
    embedding = parse_mask_embedding(SPEC, content)
    assert embedding.device.type == "cpu"
    assert torch.equal(embedding, NUMBERS)
