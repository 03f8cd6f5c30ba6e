# syntax=docker/dockerfile:1
# Everything that training needs; model, data and results stay outside:
#
#   docker build -t llama-ft .
#   docker run --rm --gpus all --ipc host -v "$PWD/output:/workspace/output" -v llama-ft-cache:/cache llama-ft \
#     torchrun --nproc_per_node 8 recipes/finetuning.py --config configs/llama3.3_70b_lora_8x80gb.yaml
#
# torch's wheels bring CUDA with them; of the host only the driver and the NVIDIA Container Toolkit are needed.
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
RUN pip install --no-cache-dir --no-deps -e .

USER 1000
ENV HF_HOME=/cache/huggingface \
    LLAMA_FT_CACHE=/cache/llama_ft \
    PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "--"]
CMD ["python", "recipes/finetuning.py", "--help"]
