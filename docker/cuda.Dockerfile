# Serves with vLLM's own CUDA image and vllm-dflash. From the repository's root:
#   docker build --file docker/cuda.Dockerfile --tag vllm-dflash:cuda .
#   docker run --rm --gpus all --ipc host --publish 127.0.0.1:8000:8000 --env HF_TOKEN \
#       --volume vllm-dflash:/home/vllm/.cache vllm-dflash:cuda Qwen/Qwen3-8B \
#       --speculative-config '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}'
# The volume keeps downloaded models and what vLLM and this package compile. HF_TOKEN is for models
# that ask for one: it is passed on from your shell, and is in no image.
# Without a download, the demo pair that is inside:
#   docker run ... vllm-dflash:cuda models/demo/target \
#       --speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'
# vLLM 0.33 instead of 0.32, which is tested on GPUs: --build-arg VLLM=v0.33.0
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}

WORKDIR /opt/vllm-dflash
COPY pyproject.toml README.md LICENSE ./
COPY models models
COPY vllm_dflash vllm_dflash
# --no-deps: the image has vLLM, a torch that fits it and all else; nothing may replace those.
RUN python3 -m pip install --no-cache-dir --no-deps . \
    && python3 -c "import numpy, packaging, pydantic, rich.table, safetensors, transformers" \
    && useradd --create-home --uid 10001 vllm \
    && install --directory --owner=vllm --group=vllm /home/vllm/.cache

USER 10001
ENV HOME=/home/vllm
VOLUME ["/home/vllm/.cache"]
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python3", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["vllm", "serve"]
