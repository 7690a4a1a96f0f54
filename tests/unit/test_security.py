"""A drafter's folder is data: nothing in it is run, and nothing outside it is read.

`create_engine_config` is what `LLM(...)` and `vllm serve` call before they start anything.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_draft_load_config

from support.pairs import Pair, make_pair
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.checkpoint.tensors import parse_mask_embedding
from vllm_dflash.model.draft_model import DFlashDraftModel


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "pair")


class Malicious:
    """Creates a folder when it is unpickled carelessly."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_the_malicious_pickle_works(tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    pickle.loads(pickle.dumps(Malicious(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


def test_a_malicious_mask_embedding_is_refused_and_not_run(pair: Pair, tmp_path: Path) -> None:
    evil = {"embedding": Malicious(tmp_path / "trace")}
    torch.save(evil, pair.drafter / "mask_embedding.pt")
    with pytest.raises(DrafterError, match=r"mask_embedding\.pt cannot be read as plain tensors"):
        pair.start()
    assert not (tmp_path / "trace").exists()


def test_a_damaged_mask_embedding(pair: Pair) -> None:
    """Cut anywhere, or changed anywhere, it is refused, or read as the right number of numbers."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(64), buffer)
    whole, refused = buffer.getvalue(), 0
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    for place in range(0, len(whole), 23):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
    for content in [b"", b"\0" * 64, *damaged]:
        try:
            assert parse_mask_embedding(pair.spec, content).shape == (64,)
        except DrafterError as error:
            assert "mask_embedding.pt" in str(error)  # noqa: PT017 - either is right
            refused += 1
    assert refused > 10


def test_pickled_weights_alone_are_refused(pair: Pair, tmp_path: Path) -> None:
    (pair.drafter / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        torch.save({"fc.weight": Malicious(tmp_path / "trace")}, pair.drafter / name)
    with pytest.raises(DrafterError, match=r"holds no \*\.safetensors file"):
        pair.start()
    assert not (tmp_path / "trace").exists()


def test_a_pickle_named_safetensors_is_refused(pair: Pair, tmp_path: Path) -> None:
    torch.save(Malicious(tmp_path / "trace"), pair.drafter / "model.safetensors")
    assert zipfile.is_zipfile(pair.drafter / "model.safetensors")
    with pytest.raises(DrafterError, match=r"model\.safetensors.* cannot be read"):
        pair.start()
    assert not (tmp_path / "trace").exists()


def loaded(config: Any) -> dict[str, torch.Tensor]:
    """Tensors that vLLM's loader reads for our draft model."""
    loader = DefaultModelLoader(get_draft_load_config(config))
    draft = config.speculative_config.draft_model_config
    return dict(loader.get_all_weights(draft, DFlashDraftModel))


@pytest.mark.parametrize("of_drafter", [False, True])
@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "pt", "npcache", "mistral"])
def test_vllms_loader_takes_safetensors_only(
    pair: Pair, load_format: str, of_drafter: bool
) -> None:
    """Whatever the --load-format is, of the target or of the drafter; its other settings stay."""
    for name in ("pytorch_model.bin", "model.pt"):
        torch.save({"pickled": torch.zeros(1)}, pair.drafter / name)
    given: dict[str, Any] = {"load_format": load_format, "use_tqdm_on_load": False}
    config = pair.start({"draft_load_config": given}) if of_drafter else pair.start(**given)
    assert not get_draft_load_config(config).use_tqdm_on_load
    assert loaded(config).keys() == load_file(pair.drafter / "model.safetensors").keys()


def test_vllms_loader_does_not_leave_the_folder(pair: Pair) -> None:
    """An index may have been changed since the start, or come from a hub."""
    config = pair.start()
    outside = pair.drafter.parent / "outside.safetensors"
    save_file({"outside": torch.zeros(1)}, outside)
    for name in ("../outside.safetensors", str(outside)):
        index = {"weight_map": {"fc.weight": "model.safetensors", "x": name}}
        (pair.drafter / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(FileNotFoundError, match="referenced in index but missing"):
            loaded(config)


@pytest.mark.parametrize("trust", [False, True])
def test_code_beside_a_drafter_is_not_imported(pair: Pair, tmp_path: Path, trust: bool) -> None:
    """`trust_remote_code` is for the target, and its setting there does not change."""
    code = f"import os\nos.mkdir({str(tmp_path / 'trace')!r})\n"
    code += "from transformers import Qwen3Config\nclass Evil(Qwen3Config):\n    pass\n"
    (pair.drafter / "evil.py").write_text(code)
    file = pair.drafter / "config.json"
    auto_map = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil")
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto_map}))
    config = pair.start(trust_remote_code=trust)
    assert not (tmp_path / "trace").exists()
    assert config.model_config.trust_remote_code is trust
    assert config.speculative_config.draft_model_config.trust_remote_code is False


def test_a_refused_drafter_leaves_the_targets_trust_alone(pair: Pair) -> None:
    """The setting is changed meanwhile, and restored whatever happens."""
    file = pair.drafter / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "initializer_range": "x"}))
    args = EngineArgs(model=str(pair.target), skip_tokenizer_init=True, trust_remote_code=True)
    target = args.create_model_config()
    args.speculative_config = {"method": "dflash", "model": str(pair.drafter)}
    with pytest.raises(StrictDataclassFieldValidationError, match="initializer_range"):
        args.create_speculative_config(target, ParallelConfig())
    assert target.trust_remote_code is True


def test_a_link_to_something_else_is_not_shown(pair: Pair, tmp_path: Path) -> None:
    """Links are followed (a hub's cache has them), but what is not a drafter stays unread."""
    secret = tmp_path / "secret"
    secret.write_text("the secret itself " * 1000)
    for name in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        (pair.drafter / name).unlink(missing_ok=True)
        (pair.drafter / name).symlink_to(secret)
        with pytest.raises(DrafterError, match="cannot be read") as refused:
            pair.start()
        assert "the secret" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "config.json", "mask_embedding.pt"],
)
def test_a_pipe_is_not_waited_for(pair: Pair, name: str) -> None:
    (pair.drafter / name).unlink(missing_ok=True)
    os.mkfifo(pair.drafter / name)
    if name in ("mask_embedding.pt", "model.safetensors.index.json"):
        # As if it were not there, to vLLM's reader as well.
        pair.start()
    else:
        with pytest.raises(DrafterError, match=r"is not a file|has no config\.json"):
            pair.start()
