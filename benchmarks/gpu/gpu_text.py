"""Compare the demo pair's text with plain decoding's on this GPU, and acceptance with a CPU's."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any

from demo_models import DEMO, DFLASH, HELD_OUT
from gpu.gpu_machine import telling_lines
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import EngineDied, Server
from vllm_dflash.tools.verify.gate import EXACT, TIE, GateSettings, verify
from vllm_dflash.tools.verify.verify_command import plain_server

# With such a small pair drafting may not pay, and then nothing would be verified.
FIXED = {"draft_length": "fixed"}
BLOCK_DRAFTS = 7
"""Drafts in a block of the demo drafter."""
PROMPTS = 24
ON_A_CPU = {"float32": 2.79, "bfloat16": 2.81}
"""Tokens of a verify step of these prompts, 64 tokens each, on either model runner."""
FAR = {"float32": 0.05, "bfloat16": 0.10}
"""Share by which acceptance may differ. In bfloat16, near-ties are decided differently. With trees,
acceptance may be higher by any amount: they have the chain's nodes, and others."""
TIES = {EXACT: 1e-3, "bfloat16": TIE}
"""Nat. A GPU's kernels round differently for another number of rows, in float32 as well."""


TRACED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def flags(options: argparse.Namespace) -> list[str]:
    """Return flags of both servers: small, fixed sizes, because both run together.

    An engine that asks how much memory is left while the other one allocates gets a useless answer.
    """
    found = ["--max-model-len", "512", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.3"]
    if options.tiny:
        found = ["--max-model-len", "256", "--max-num-seqs", "2"]
    room = 32 << 20 if options.tiny else 1 << 30
    found += ["--dtype", options.dtype, "--async-scheduling", "--kv-cache-memory-bytes", str(room)]
    if options.mode == "eager":
        found += ["--enforce-eager"]
    elif options.tiny:  # on an emulated GPU, which cannot compile
        rows = 1 + (options.tree or BLOCK_DRAFTS)
        sizes = {"cudagraph_capture_sizes": [1, rows, 2 * rows]}
        found += ["--compilation-config", json.dumps(TRACED | sizes)]
    return found + (["--attention-backend", options.backend] if options.backend else [])


def compare(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Return the results of `verify` and the expected values. The verdict says what is wrong."""
    prompts = read_prompts(options.prompts, PROMPTS)
    settings = GateSettings(tuple(options.concurrency), options.tokens, TIES[options.dtype])
    target, ours = str(DEMO / "target"), logs / f"{options.name}-dflash.log"
    speculative = DFLASH | ({} if options.planned else FIXED)
    speculative |= {"draft_tree": options.tree} if options.tree else {}
    speculative |= {"enable_adaptive_verification": True} if options.adaptive else {}
    # Both start at the same time, because starting takes most of the time.
    with plain_server(logs / f"{options.name}-plain.log", target, flags(options)) as plain:
        found = verify(
            prompts,
            lambda: Server(ours, target, flags(options), speculative_config=speculative),
            lambda: nullcontext(plain),
            settings,
            progress_on(),
        )
    result = found.to_dict()
    lengths = [level["acceptance_length"] for level in result["levels"]]
    words = [found.verdict, *(f"{one:.2f}" if one else "none" for one in lengths)]
    result |= {"log": telling_lines(ours), "ok": found.exit_code == 0}
    if not (options.tiny or options.planned or options.adaptive):
        expected = ON_A_CPU[options.dtype]
        result["on a CPU"] = expected
        words[-1] += f" tokens a step, {expected:.2f} on a CPU"
        far = FAR[options.dtype]
        most = inf if options.tree else 1 + far
        near = [one and 1 - far <= one / expected <= most for one in lengths]
        result["ok"] &= all(near)
    if options.tree and "drafts are trees" not in ours.read_text(errors="replace"):
        result["ok"] = False
        words.append("drafts were no trees")
    return result | {"verdict": ", ".join(words)}


def main() -> int:
    """Compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dtype", choices=TIES, required=True)
    add("--mode", choices=("eager", "graphs"), required=True)
    add("--backend", default="")
    add("--prompts", type=Path, default=HELD_OUT)
    add("--concurrency", type=int, nargs="+", default=[1, 8])
    add("--tokens", type=int, default=64)
    add("--planned", action="store_true", help="lengths are planned, as by default")
    add("--adaptive", action="store_true", help="vLLM verifies only the most likely drafts")
    add("--tree", type=int, default=0, metavar="N", help="drafts are trees of up to N nodes")
    add("--tiny", action="store_true")
    add("file", type=Path)
    options = parser.parse_args()
    options.name = options.file.stem
    try:
        result = compare(options, options.file.parents[1] / "log")
    except (EngineDied, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    options.file.write_text(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
