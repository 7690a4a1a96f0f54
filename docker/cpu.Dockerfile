# Serves with vLLM for CPU and vllm-dflash. From the repository's root:
#   docker build --file docker/cpu.Dockerfile --tag vllm-dflash:cpu .
#   docker run --rm --publish 127.0.0.1:8000:8000 --env HF_TOKEN \
#       --volume vllm-dflash:/home/vllm/.cache vllm-dflash:cpu models/demo/target \
#       --speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'
# The volume keeps downloaded models and what vLLM compiles. HF_TOKEN is for models that ask
# for one: it is passed on from your shell, and is in no image. The demo pair is inside.
FROM python:3.11-slim

# vLLM compiles models as it starts (g++; the image has Python's headers), and links libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 vllm \
    && install --directory --owner=vllm --group=vllm /home/vllm/.cache

# Where pip finds the CPU build of torch; without it comes PyPI's CUDA build, of several GB.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/vllm-dflash
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY models models
COPY vllm_dflash vllm_dflash
RUN PIP_NO_CACHE_DIR=1 bash scripts/setup.sh

USER 10001
# What is imported is compiled once, into the volume: the user cannot write beside the packages.
ENV HOME=/home/vllm PYTHONPYCACHEPREFIX=/home/vllm/.cache/pycache
VOLUME ["/home/vllm/.cache"]
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["scripts/run.sh", "vllm", "serve"]
