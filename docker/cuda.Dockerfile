# Serves with vLLM's own CUDA image and vllm-dflash. From the repository's root:
#   docker build --file docker/cuda.Dockerfile --tag vllm-dflash:cuda .
#   docker run --rm --gpus all --ipc host --publish 127.0.0.1:8000:8000 vllm-dflash:cuda \
#       Qwen/Qwen3-8B \
#       --speculative-config '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}'
FROM vllm/vllm-openai:v0.32.0

WORKDIR /opt/vllm-dflash
COPY pyproject.toml README.md LICENSE ./
COPY vllm_dflash vllm_dflash
# --no-deps: the image has vLLM, a torch that fits it and all else; nothing may replace those.
RUN python3 -m pip install --no-cache-dir --no-deps . \
    && python3 -c "import numba, numpy, packaging, rich.table, safetensors, transformers" \
    && useradd --create-home --uid 10001 vllm

USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python3", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["vllm", "serve"]
