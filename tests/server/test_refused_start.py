"""`vllm serve` with a drafter that is refused; tests/unit/config tests what is refused."""

import json
import subprocess
from pathlib import Path

from support.pairs import make_pair
from support.servers import VLLM


def test_vllm_serve_exits_with_the_message(tmp_path: Path) -> None:
    """Users of the command see the same refusal: exit code, and nothing left running."""
    pair = make_pair(tmp_path)
    config = json.dumps({"method": "dflash", "model": "/nowhere/drafter"})
    command = [VLLM, "serve", str(pair.target)]
    command += ["--skip-tokenizer-init", "--port", "0", "--speculative-config", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "drafter '/nowhere/drafter': this folder does not exist" in output
    assert "EngineCore" not in output
    # Logged once at ERROR, where people look first, then again at the end of the traceback.
    before, _, after = output.partition("Traceback")
    said = [line for line in output.splitlines() if "drafter '/nowhere/drafter': this" in line]
    assert ["ERROR" in line for line in said] == [True, False]
    assert said[0] in before
    assert said[1] in after
