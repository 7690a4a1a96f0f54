"""Compile kernels for GPUs without having one: python -m support.compile_child 90, with a list of
kernels, types and constants in JSON. Print a line of JSON for each."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile

import vllm_dflash
from emulated.interpreter import pretend_a_device

PACKAGE = Path(vllm_dflash.__file__).parent


def launched_kernels() -> dict[str, Path]:
    """Return the files of all kernels that are launched, not called by another kernel, by file and
    name."""
    sources = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    everywhere = "\n".join(sources.values())
    return {
        f"{file.stem}.{each.name}": file
        for file, source in sources.items()
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in each.decorator_list)
        and re.search(rf"\b{each.name}\[.*\]\(", everywhere)
    }


def memory_of(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it spills to memory."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(told.partition(f"{word}:")[2].split()[0])
        for name, word in (("registers", "REG"), ("spilled", "STACK"))
    }


def main() -> None:
    pretend_a_device()
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = launched_kernels()
    for one in json.load(sys.stdin):
        file = places[one["kernel"]]
        module = import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
        backends.pop("cpu", None)  # it compiles nothing; vLLM, once imported, does without it
        kernel = getattr(module, one["kernel"].split(".")[1])
        types = {name: kind for name, kind in one["types"].items() if kind is not None}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        constants = {
            (number,): one["fixed"].get(name)
            for number, name in enumerate(kernel.arg_names)
            if name not in types
        }
        # As in use: PyTorch's memory begins at such addresses, and strides are such numbers.
        aligned = {
            (param.num,): [["tt.divisibility", 16]]
            for param in kernel.params
            if types.get(param.name, "fp32") != "fp32" and not param.do_not_specialize
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        for gpu in map(int, sys.argv[1:]):
            made = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=one["options"])
            assert made.asm["cubin"]
            found = {"gpu": gpu, "kernel": one["kernel"], "shared": made.metadata.shared}
            on_the_way = re.findall(r"cp\.async\.wait_group\s+(\w+)", made.asm["ptx"])
            found["on_the_way"] = max((int(each, 0) for each in on_the_way), default=0)
            found |= memory_of(made.asm["cubin"]) if "tree_move" in one["kernel"] else {}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
