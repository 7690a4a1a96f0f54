"""Compile the device at first use (a minute on one core) and keep it in the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "_emulated_device"
SOURCES = Path(__file__).with_name("device")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emulated-gpu"
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1")


def why_not() -> str | None:
    """Return why this machine can have no device; None if it can."""
    if torch.version.cuda is not None:
        return (
            f"PyTorch {torch.__version__} is a build for CUDA; the emulated device needs a CPU one"
        )
    if not library().exists() and compiler() is None:
        return "no C++ compiler (g++) to compile the emulated device with"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """Return the compiled device's path, a new one for other sources, PyTorch or Python."""
    stamp = hashlib.sha256(f"{torch.__version__} {sys.version_info[:2]} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        stamp.update(source.name.encode() + source.read_bytes())
    return CACHE / f"{NAME}-{stamp.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the device, unless that was done before."""
    made = library()
    if made.exists():
        return made
    found = compiler()
    assert found is not None, why_not()
    CACHE.mkdir(parents=True, exist_ok=True)
    ours = made.with_suffix(f".{os.getpid()}")  # another process may be compiling, too
    includes, libraries = f"{torch.__path__[0]}/include", f"{torch.__path__[0]}/lib"
    folders = [includes, f"{includes}/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [found, *FLAGS, *(f"-I{folder}" for folder in folders), str(SOURCES / "device.cpp")]
    command += ["-o", str(ours), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-8000:]}")
    ours.replace(made)
    return made


def load() -> ModuleType:
    """Return the device's functions (`device/device.cpp`)."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


if __name__ == "__main__":
    print(build())
