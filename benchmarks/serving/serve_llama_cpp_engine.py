"""Run llama.cpp's own server, from the package xllamacpp, until stdin ends.

python serve_llama_cpp_engine.py PORT MODEL [ADAPTER]
"""

import sys

import xllamacpp


def main(port: str, model: str, *adapters: str) -> None:
    """Serve a GGUF file, with an adapter."""
    settings = xllamacpp.CommonParams()
    settings.hostnames = ["127.0.0.1"]
    settings.port = int(port)
    settings.model.path = model
    settings.n_ctx = 512
    settings.n_parallel = 1
    settings.use_jinja = True
    settings.cpuparams.n_threads = 1
    settings.cpuparams_batch.n_threads = 1
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # the cache of keys and values in fp32: by default it is rounded to 16 bits
    settings.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in adapters]
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
