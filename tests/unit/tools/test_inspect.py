"""`vllm-dflash inspect`: verdicts, exit codes, JSON, and that no weights are read."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DEMO, ROOT
from support.commands import examples_of
from support.inspected import SMALL, check_schema, inspect
from support.pairs import Pair, changed_drafter, drafter_config, save_drafter
from support.targets import write_config
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.tensors import expected_tensors
from vllm_dflash.tools import cli
from vllm_dflash.tools.inspect import inspection
from vllm_dflash.tools.tables import Table


def test_overrides_of_the_drafters_config(pair: Pair) -> None:
    overrides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    found = inspect(pair.drafter, pair.target, drafter_overrides=overrides)
    assert found.exit_code == 0
    assert found.drafter is not None
    assert found.drafter.windows == (20, None)
    assert found.speculative_config is not None
    assert found.speculative_config["drafter_overrides"] == overrides
    found = inspect(pair.drafter, pair.target, drafter_overrides={"sliding_windows": 20})
    assert found.exit_code == 2
    assert "did you mean 'sliding_window'?" in str(found.error)


def test_a_pair_that_fits(pair: Pair) -> None:
    found = inspect(pair.drafter, pair.target, revision="main")
    assert found.exit_code == 0
    assert not found.faults
    assert not found.not_checked
    assert found.speculative_config == {
        "method": "dflash",
        "model": str(pair.drafter),
        "revision": "main",
    }
    assert found.command is not None
    words = shlex.split(found.command)
    assert words[:3] == ["vllm", "serve", str(pair.target)]
    assert words[3:-2] == ["--dtype", "float32", "--max-model-len", "256"]
    assert json.loads(words[-1]) == found.speculative_config
    assert found.drafter is not None
    assert (found.drafter.dialect, found.drafter.block_size) == ("z-lab", 8)
    assert found.drafter.windows == (None, None)
    tensors = load_file(pair.drafter / "model.safetensors")
    assert found.tensors is not None
    assert found.tensors.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.tensors.num_bytes == 4 * found.tensors.parameters
    assert found.tensors.dtypes == {"F32": len(tensors)}
    assert not found.tensors.own_embedding
    assert not found.tensors.own_head


def test_ranks_that_the_target_cannot_have(pair: Pair) -> None:
    asked = {**SMALL, "tensor_parallel_size": 3}
    found = inspect(pair.drafter, pair.target, asked)
    assert found.exit_code == 1
    assert {fault.kind for fault in found.faults} == {"parallel"}
    said = [fault.message for fault in found.faults]
    assert any("the target's 4 attention heads do not divide" in one for one in said)
    assert found.memory is None


def test_remarks_on_a_config_are_among_the_warnings(pair: Pair, tmp_path: Path) -> None:
    found = inspect(changed_drafter(tmp_path, dflash_config={"mask_token": 3}), pair.target)
    assert found.exit_code == 0
    (warning,) = found.warnings
    assert "dflash_config has 'mask_token'" in warning


def test_a_target_whose_engines_are_left_to_vllm(pair: Pair, tmp_path: Path) -> None:
    write_config(tmp_path, "NemotronH")
    found = inspect(pair.drafter, tmp_path)
    assert found.exit_code == 0
    (warning,) = [one for one in found.warnings if "vLLM's own DFlash runs this target" in one]
    assert "a hybrid without gated delta nets" in warning


def test_a_target_without_taps(pair: Pair, tmp_path: Path) -> None:
    from transformers import OPTConfig

    shape = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 2, "word_embed_proj_dim": 64}
    config = OPTConfig(vocab_size=320, num_hidden_layers=5, architectures=["OPTForCausalLM"])
    config.update({**shape, "max_position_embeddings": 512})
    config.save_pretrained(tmp_path)
    found = inspect(pair.drafter, tmp_path)
    assert found.exit_code == 1
    assert [fault.kind for fault in found.faults] == ["target", "pair"]
    assert "gives no hidden states" in found.faults[0].message


def test_integers_are_a_fault_and_eight_bit_floats_a_warning(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].char()
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect(tmp_path, pair.target)
    (fault,), (warning,) = found.faults, found.warnings
    assert "fc.weight is stored as I8" in fault.message
    assert "stored as F8_E4M3:" in warning


@pytest.mark.parametrize(
    ("folder", "message"), [("nowhere", "does not exist"), ("", "has no config.json")]
)
def test_a_target_that_cannot_be_read(
    pair: Pair, tmp_path: Path, folder: str, message: str
) -> None:
    found = inspect(pair.drafter, tmp_path / folder)
    assert found.exit_code == 2
    assert found.error is not None
    assert found.error.startswith("target ")
    assert message in found.error
    assert found.drafter is not None  # what could be read is there


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def peak_memory(*, reset: bool = False) -> int:
    """Return this process's peak memory since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def test_a_large_pair_without_reading_a_weight(tmp_path: Path) -> None:
    """The drafter is a sparse file of two gigabytes; the target has 36 layers and no weights."""
    from transformers import Qwen3Config

    config = drafter_config(
        **QWEN3_8B,
        num_hidden_layers=5,
        num_target_layers=36,
        block_size=16,
        dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    )
    drafter, target = tmp_path / "drafter", tmp_path / "target"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (rows, *columns) in expected_tensors(parse_config("it", config)).items():
        begin, end = end, end + 2 * rows * (columns[0] if columns else 1)
        header[name] = {"dtype": "BF16", "shape": [rows, *columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = drafter / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    Qwen3Config(
        **QWEN3_8B, num_hidden_layers=36, architectures=["Qwen3ForCausalLM"], dtype="bfloat16"
    ).save_pretrained(target)
    inspect(DEMO / "drafter", DEMO / "target")  # so that libraries are in memory
    before = peak_memory(reset=True)
    found = inspect(drafter, target, {})
    assert peak_memory() - before < 100 << 20
    assert found.exit_code == 0
    assert found.tensors is not None
    assert found.memory is not None
    stacked = 5 * (2 * 8 * 128 * 4096 + 128) * 2  # K and V projections once more, and K norms
    assert found.memory.drafter_weights - stacked == found.tensors.num_bytes == end > 2_000_000_000
    assert found.memory.drafter_cache_per_token == 5 * 2 * 8 * 128 * 2


def test_the_example_of_help_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text has no escape codes even if colours are asked for: there is no terminal."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(examples_of("inspect", capsys)[0]) == 0
    printed = capsys.readouterr().out
    assert not re.search("[\x1b┃│]", printed)
    assert printed.rstrip().endswith(
        """--speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'"""
    )


def test_what_is_said_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(tmp_path, drafter_config())
    target = ["--target", str(DEMO / "target")]
    assert cli.main(["inspect", str(tmp_path), *target]) == 1
    said = capsys.readouterr().out
    assert "Does not fit" in said
    assert "num_target_layers is 4 in the drafter, the target has 6 layers" in said
    assert cli.main(["inspect", "/nowhere", *target]) == 2
    assert "Cannot be read: drafter '/nowhere'" in capsys.readouterr().err
    assert cli.main(["inspect", "/nowhere", *target, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    check_schema(found)
    assert (found["exit_code"], "does not exist" in found["error"]) == (2, True)


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "inspect.md").read_text()))
    known = [one for one in vars(inspection).values() if dataclasses.is_dataclass(one)]
    kinds = [one for one in known if one is not Table]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert keys - documented == set()
