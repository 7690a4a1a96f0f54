#!/usr/bin/env bash
# Serve SmolLM2-135M with DFlash on 127.0.0.1:8000, and ask it something from another terminal:
#   examples/serve.sh
#   scripts/run.sh python examples/client.py
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/run.sh python examples/smollm2_target.py
exec scripts/run.sh vllm serve models/smollm2/target \
    --served-model-name smollm2 --host 127.0.0.1 --port "${PORT:-8000}" --max-model-len 2048 \
    --speculative-config '{"method": "dflash", "model": "models/smollm2/drafter"}' "$@"
