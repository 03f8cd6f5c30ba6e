"""Serve what `--for llama.cpp` writes with llama.cpp itself, on the CPU, and compare log-probabilities.

    python benchmarks/serving/serve_llama_cpp.py

The Python package xllamacpp has llama.cpp's own server, in an environment of its own. Small random
models are fine-tuned for five steps; an adapter and a merged model are exported, and served in fp32.
llama.cpp gives log-probabilities of the next token only. `base` is served, too: it must be told from
the adapter.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "src", "recipes")]

from safetensors.torch import load_file, save_file

from benchmarks.serving import serve_runs
from benchmarks.serving.serve import LORA, SETTINGS, free_port, write_samples
from benchmarks.serving.serve_models import write_model, write_tokenizer
from benchmarks.serving.vllm_package import make_environment
from llama_ft.data import cache_dir
from llama_ft.extensions.serving.gguf_files.write import write_model as write_gguf
from llama_ft.extensions.serving.probes.ask import ask, rendered_chat
from llama_ft.extensions.serving.probes.check import compared
from llama_ft.extensions.serving.probes.probes import find_probes
from llama_ft.inference.server import Server
from llama_ft.inference.verdict import judge

ENGINE = Path(__file__).with_name("serve_llama_cpp_engine.py")
VERSION = "2026.10.11549"
PACKAGE = f"xllamacpp=={VERSION}"
FAMILIES = ("Llama", "Qwen3")
MERGES = (("e", "r"), ("t", "o"), ("o", "n"), ("er", "s"))  # llama.cpp wants at least one


def make_files(family: str, work: Path) -> Path:
    """Fine-tune a model and write its GGUF files. Return the directory."""
    folder = work / family
    write_model(family, folder / "base")
    write_tokenizer(folder / "base", MERGES)
    paths = f"--model_name {folder}/base --dataset {work}/samples.jsonl --output_dir {folder}/run"
    serve_runs.train(f"{paths} {SETTINGS} {LORA}".split())
    target = "--for llama.cpp --overwrite true"
    serve_runs.export(f"{target} {folder}/run/model {folder}/adapter".split())
    merge = "--merge --save_dtype float32"
    serve_runs.export(f"{target} {merge} {folder}/run/model {folder}/merged".split())
    # as llama.cpp's convert_hf_to_gguf.py does, in fp32, because llama.cpp rounds what it
    # multiplies with weights in bf16
    shutil.copytree(folder / "base", folder / "base_gguf")
    file = folder / "base_gguf" / "model.safetensors"
    weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    write_gguf(folder / "base_gguf")
    return folder


@contextmanager
def serving(python: Path, log: Path, *files: Path) -> Iterator[str]:
    """Run a server of GGUF files for the block, whose address is yielded."""
    command = [python, ENGINE, str(free_port()), *files]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise OSError(f"the server did not start: see {log}")
            yield address
        finally:
            process.kill()
            process.wait()


def compare(address: str, run: Path) -> str:
    """Return what a server computes, compared with a run."""
    _, probes = find_probes(str(run))
    server = Server(address, 120)
    verdict = judge([*compared(probes, ask(server, "any", probes.probes)).following], None)
    assert probes.chat is not None
    is_same = rendered_chat(server, "any", probes.chat) == list(probes.chat.token_ids)
    word = verdict.weights.value if verdict.weights else "cannot be told"
    numbers = f"largest difference {verdict.largest:.1e} of {verdict.count}, base {verdict.largest_of_base:.1e}"
    return f"{word} ({numbers}); chat template {'equal' if is_same else 'different'}"


def main() -> None:
    """Serve all families."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--work", type=Path, default=cache_dir() / "benchmarks" / "llama_cpp")
    options = parser.parse_args()
    try:
        python = make_environment(cache_dir() / "benchmarks" / f"xllamacpp-{VERSION}", PACKAGE)
    except OSError as error:
        sys.exit(f"error: {PACKAGE} cannot be installed here: {error}")
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    write_samples(options.work / "samples.jsonl")
    for family in options.families:
        folder = make_files(family, options.work)
        base = folder / "base_gguf" / "model.gguf"
        for title, files in {
            "merged": [folder / "merged" / "model.gguf"],
            "LoRA": [base, folder / "adapter" / "adapter.gguf"],
            "base": [base],
        }.items():
            with serving(python, folder / f"{title}.log", *files) as address:
                print(f"{family}, {title}: {compare(address, folder / 'run')}", flush=True)


if __name__ == "__main__":
    main()
