"""Things break while a drafter is read, started or served: a clear end, in bounded time.

What the config's fields may be in general is in test_config_fuzz.py, what is refused otherwise in
test_bad_input.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from vllm.engine.arg_utils import EngineArgs

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.pairs import Pair, drafter_config, make_pair
from support.servers import MODEL, VLLM, Server, serving
from vllm_dflash.checkpoint.headers import read_folder
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.pair import check_weights

DFLASH = ["--speculative-config.method=dflash"]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "pair")


def create_config(pair: Pair) -> None:
    """What stands before any process of an engine."""
    EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        speculative_config={"method": "dflash", "model": str(pair.drafter)},
    ).create_engine_config()


def refusal(pair: Pair) -> str:
    with pytest.raises(DrafterError) as refused:
        create_config(pair)
    return str(refused.value)


# --- between two runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4, 100, 5000])
def test_weights_cut_short_between_runs(pair: Pair, left: int) -> None:
    create_config(pair)
    os.truncate(pair.drafter / "model.safetensors", left)
    message = refusal(pair)
    assert str(pair.drafter / "model.safetensors") in message
    assert "cannot be read" in message


def test_weights_removed_between_runs(pair: Pair) -> None:
    create_config(pair)
    (pair.drafter / "model.safetensors").unlink()
    assert str(pair.drafter) in (message := refusal(pair))
    assert "holds no *.safetensors file" in message


def test_a_shard_removed_between_runs(pair: Pair) -> None:
    """The tensors that went with it are named."""
    from safetensors.torch import load_file, save_file

    whole = pair.drafter / "model.safetensors"
    tensors = load_file(whole)
    last = {name: tensors.pop(name) for name in list(tensors) if name.startswith("layers.1.mlp")}
    save_file(last, pair.drafter / "model-2.safetensors")
    save_file(tensors, whole)
    create_config(pair)
    (pair.drafter / "model-2.safetensors").unlink()
    message = refusal(pair)
    assert all(f"missing {name}" in message for name in last)


def test_the_folder_removed_between_runs(pair: Pair) -> None:
    shutil.rmtree(pair.drafter)
    assert "does not exist" in refusal(pair)


# --- damaged files --------------------------------------------------------------------------------


def outcome(folder: Path) -> str | None:
    """What a start says of a folder's weights, without vLLM around it; None: they fit."""
    try:
        check_weights(read_drafter(str(folder)), folder)
    except DrafterError as refused:
        return str(refused)
    return None


@pytest.mark.timeout(120)
def test_flipped_header_bytes(pair: Pair) -> None:
    """Refused by the file's name or by its tensors', or else the names and shapes still fit."""
    file = pair.drafter / "model.safetensors"
    whole, intact = file.read_bytes(), read_folder(pair.drafter)
    header = 8 + int.from_bytes(whole[:8], "little")
    chance, seen = random.Random(0), {"file": 0, "tensors": 0, "fits": 0}
    for _ in range(400):
        flipped = bytearray(whole)
        for place in chance.sample(range(header), chance.choice([1, 1, 1, 3, 20])):
            flipped[place] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        message = outcome(pair.drafter)
        if message is None:
            assert read_folder(pair.drafter) == intact
            seen["fits"] += 1
        elif str(file) in message:
            seen["file"] += 1
        else:
            assert "the weights do not match config.json" in message
            assert any(word in message for word in ("missing", "surplus", "has shape", "is stored"))
            seen["tensors"] += 1
    assert seen["file"] > 50
    assert seen["tensors"] > 50


# Field, value, what the message must hold.
HUGE: list[tuple[str, Any, str]] = [
    ("block_size", 10**9, "block_size must be an integer from 2 to 1024"),
    ("hidden_size", 2**63, "hidden_size must be an integer"),
    ("hidden_size", 10**9, "hidden states of size 1000000000"),
    ("num_hidden_layers", 10**6, "num_hidden_layers must be an integer from 1 to 1024"),
    ("num_hidden_layers", 1024, "layers.1000."),
    ("num_attention_heads", 10**9, "q_proj"),
    ("num_key_value_heads", 10**9, "num_key_value_heads"),
    ("head_dim", 10**9, "q_proj"),
    ("intermediate_size", 2**31, "mlp"),
    ("vocab_size", 2**40, "vocab_size must be an integer"),
    ("vocab_size", 10**9, "vocab_size is 1000000000 in the drafter"),
    ("draft_vocab_size", 10**9, "d2t [1000000000]"),
    ("target_hidden_size", 10**12, "target_hidden_size must be an integer"),
    ("num_target_layers", 10**12, "num_target_layers must be an integer"),
    ("max_position_embeddings", 10**12, "max_position_embeddings must be an integer"),
    ("rms_norm_eps", 10**30, "rms_norm_eps must be a positive number"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e12}, "factor of rope_parameters"),
    ("rope_parameters", {"rope_type": "linear", "factor": 1e8}, "factor of rope_parameters"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e-9}, "factor of rope_parameters"),
    ("rope_parameters", {"rope_type": "linear", "factor": float("inf")}, "factor of"),
    ("rope_parameters", {"rope_theta": float("nan")}, "rope_theta of rope_parameters"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_dim": 10**9}, "rope_dim 1000000000"),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 1e6}, "partial_rotary_factor"),
    ("layer_types", ["full_attention"] * 10**5, "layer_types names 100000 layers"),
    ("layer_types", "x" * 10**6, "layer_types must be a list"),
    ("dflash_config", {"mask_token_id": 10**9}, "mask_token_id 1000000000"),
    ("dflash_config", {"target_layer_ids": [0, 2**63]}, "target_layer_ids"),
    ("dflash_config", {"target_layer_ids": list(range(10**5))}, "names 100000 layers"),
    ("dflash_config", {"use_swa": True, "swa_window_size": 10**12}, "swa_window_size"),
]


@pytest.mark.timeout(120)
def test_huge_numbers_are_refused_by_name_and_at_once(pair: Pair) -> None:
    """In little time and memory, and in messages of a readable length."""
    create_config(pair)  # imports what there is to import
    before = psutil.Process().memory_info().rss
    for field, value, expected in HUGE:
        config = drafter_config(**{field: value})
        (pair.drafter / "config.json").write_text(json.dumps(config))
        began = time.process_time()
        message = refusal(pair)
        assert time.process_time() - began < 2, field
        assert expected in message, (field, message[:500])
        assert len(message) < 10_000, field
    assert psutil.Process().memory_info().rss - before < 200 << 20


@pytest.mark.parametrize(
    "content",
    ["[1]", "null", '"text"', "[" * 100_000, '{"a":' * 50_000, "", "\0" * 100, "9" * 5000],
    ids=["list", "null", "text", "deep list", "deep object", "empty", "zeros", "long number"],
)
def test_a_config_that_is_no_object(pair: Pair, content: str) -> None:
    (pair.drafter / "config.json").write_text(content)
    assert "config.json cannot be read" in refusal(pair)


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.timeout(300)
def test_the_engine_is_killed_under_load(tmp_path: Path) -> None:
    """Clients get an error, not silence; the server leaves by itself, and nothing stays behind.

    Its drafter lies in a folder that cannot be written to, which is nothing that it needs.
    """
    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTER, drafter)
    for path in (*drafter.iterdir(), drafter):
        path.chmod(0o555 if path.is_dir() else 0o444)
    arguments = ["--enforce-eager", *DFLASH, f"--speculative-config.model={drafter}"]
    running = serving(tmp_path / "log", TARGET, *arguments)
    server = running.__enter__()
    try:
        assert server.complete(held_out_prompts(1)[0])
        kill_the_engine(server)
        assert "is active" in server.log.read_text()
    finally:
        # Its log is full of the engine's death, which `serving` would take for a fault.
        server.log.write_text("")
        running.__exit__(None, None, None)
    assert sorted(path.name for path in drafter.iterdir()) == ["config.json", "model.safetensors"]


def kill_the_engine(server: Server) -> None:
    endings: list[str] = []
    clients = [
        threading.Thread(target=endless, args=(server, prompt, endings), daemon=True)
        for prompt in held_out_prompts(6)
    ]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [process for process in family if "EngineCore" in process.name()]
    engine.send_signal(signal.SIGKILL)
    server.process.wait(60)  # exit code 0 was seen, so the code says nothing
    for client in clients:
        client.join(30)
    assert len(endings) == 6, "a client still waits"
    assert set(endings) <= {"InternalServerError", "APIConnectionError", "APIError"}, endings
    assert not psutil.wait_procs(family, timeout=30)[1]


def endless(server: Server, prompt: str, endings: list[str]) -> None:
    """A client who asks again as long as he is answered."""
    while True:
        try:
            with server.client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=400,
                stream=True,
                timeout=60,
                extra_body={"ignore_eos": True},
            ) as stream:
                for _ in stream:
                    pass
        except openai.APIError as error:
            endings.append(type(error).__name__)
            return
        except httpx.RemoteProtocolError:  # the connection broke in mid-stream
            endings.append("APIConnectionError")
            return


# A file system of 64 KiB in a namespace of its own, which needs no rights where that is allowed.
IN_NO_ROOM = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size=64k tmpfs "$0"'


@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_disk_that_is_full_when_the_models_are_compiled(tmp_path: Path) -> None:
    """The server says so and ends."""
    if subprocess.run([*IN_NO_ROOM, MOUNT, tmp_path], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of his own")
    command = [VLLM, "serve", str(TARGET), "--port=0", "--max-model-len=128", *DFLASH]
    command.append(f"--speculative-config.model={DRAFTER}")
    process = subprocess.Popen(
        [*IN_NO_ROOM, MOUNT + ' && exec "$@"', str(tmp_path), *command],
        env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family = psutil.Process(process.pid)
    left: list[psutil.Process] = []
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        left = [*family.children(recursive=True), family]
        for one in left:
            one.kill()
        output, _ = process.communicate()
    assert not left, output[-4000:]
    assert process.returncode not in (0, None)
    assert "No space left on device" in output
