# syntax=docker/dockerfile:1
# What training needs, with liger-kernel and s3fs; setup.py's other extras by --build-arg EXTRAS=gpu,s3,mlflow,eval.
# Model, data and results stay outside:
#
#   docker build -t llama-ft .
#   mkdir -p output  # user 1000 must be able to write there; if that is not you: sudo chown 1000 output
#   docker run --rm --gpus all --ipc host -e HF_TOKEN -v llama-ft-cache:/cache -v "$PWD/output:/workspace/output" \
#     -v "$PWD/my_data.jsonl:/workspace/my_data.jsonl:ro" llama-ft torchrun --nproc_per_node 8 recipes/finetuning.py \
#     --config configs/llama3.3_70b_lora_8x80gb.yaml --dataset my_data.jsonl
#
# torch's wheels contain CUDA 13. The host needs the driver (580 or newer) and the NVIDIA Container Toolkit.
FROM python:3.12-slim-bookworm

# A compiler for Triton, which makes the kernels of torch.compile and Liger; tini passes signals on and reaps processes.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ tini \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 trainer \
 && install --directory --owner trainer /workspace /workspace/output /cache
WORKDIR /workspace

COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt

COPY --chown=trainer . .
ARG EXTRAS=gpu,s3
RUN pip install --no-cache-dir -e ".[$EXTRAS]"

USER 1000
ENV HF_HOME=/cache/huggingface \
    LLAMA_FT_CACHE=/cache/llama_ft \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "--"]
CMD ["python", "recipes/finetuning.py", "--help"]
