#!/usr/bin/env bash
# Run a command in .venv, preloading the libraries that vLLM wants on CPUs, if they are there.
#   scripts/run.sh vllm-dflash demo
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
preload=()
for library in "$root/.venv/lib/libiomp5.so" /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4; do
    [ -e "$library" ] && preload+=("$library")
done
# Containers often set it. Each of an engine's three processes then compiles all of vLLM again, at
# every start: 8 s each.
unset PYTHONDONTWRITEBYTECODE
export PATH="$root/.venv/bin:$PATH"
export LD_PRELOAD=${LD_PRELOAD-$(IFS=:; echo "${preload[*]-}")}
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE-1}  # GiB, so that a laptop will do
exec "$@"
