#!/usr/bin/env bash
# Serve the demo pair with DFlash on 127.0.0.1:8000, and ask it something from another terminal:
#   examples/serve.sh
#   scripts/run.sh python examples/client.py
set -euo pipefail
cd "$(dirname "$0")/.."
exec scripts/run.sh vllm serve models/demo/target \
    --served-model-name demo --host 127.0.0.1 --port "${PORT:-8000}" --max-model-len 1024 \
    --speculative-config '{"method": "dflash", "model": "models/demo/drafter"}' "$@"
