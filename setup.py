"""Packaging: what is in src/, the recipes as commands, and which versions it works with."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
REPOSITORY_URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["llama_ft"][
    "repository_url"
]
COPIED = ("recipes", "configs", "examples")

# requirements.txt pins the tested versions; these are the supported ranges. CI's job `oldest` tests
# the lower ends, which pip can resolve together. Packages whose private parts are used have an upper
# end.
REQUIREMENTS = [
    "torch>=2.11,<2.16",
    "transformers>=5.23,<5.26",
    "peft>=0.21,<0.22",
    "bitsandbytes>=0.50,<0.51",
    "datasets>=5.2,<6",
    "tokenizers>=0.23.1,<0.24",
    "safetensors>=0.8,<0.9",
    "xxhash>=3.5",
    "huggingface_hub>=2,<3",
    "numpy>=2.1",
    "pillow>=11",
    "pyarrow>=24",
    "fsspec>=2025.3",
    "typing_extensions>=4.15",
    "Jinja2>=3.1.6",
    "MarkupSafe>=2.1",
    "pydantic>=2.11,<3",
    "PyYAML>=6.0.1",
    "fire>=0.7,<0.8",
    "rich>=13.9",
    "wandb>=0.31",
    "tensorboard>=2.18",
]


class BuildWithRecipes(build_py):
    """A wheel carries recipes/, configs/ and examples/ inside the package; `pip install -e .` uses
    them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in COPIED:
            copy = Path(self.build_lib) / "llama_ft" / folder
            shutil.rmtree(
                copy, ignore_errors=True
            )  # of an earlier build: what is gone here goes there
            shutil.copytree(ROOT / folder, copy, ignore=shutil.ignore_patterns("__pycache__"))


def read_version() -> str:
    """The version in llama_ft/__init__.py, read without importing it: torch is not installed
    yet."""
    text = (ROOT / "src/llama_ft/__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("src/llama_ft/__init__.py has no __version__")
    return found.group(1)


setup(
    name="llama_ft",
    version=read_version(),
    description="Fine-tune open language models with PyTorch FSDP",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    url=REPOSITORY_URL or None,
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE", "THIRD_PARTY_NOTICES.md"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={
        "llama_ft.extensions.report": ["*.html", "*.css", "*.js"],
        "llama_ft.extensions.serving": ["*.json"],
    },
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={"console_scripts": ["llama-ft = llama_ft.commands:main"]},
    python_requires=">=3.11",
    install_requires=REQUIREMENTS,
    extras_require={
        "gpu": ["liger-kernel>=0.8,<0.9"],
        "hybrid": [
            "flash-linear-attention",
            "causal-conv1d",
        ],  # kernels of layers that carry a state; need CUDA
        "gguf": ["gguf>=0.17,<1"],
        "eval": ["lm_eval==0.4.13"],
        "s3": ["s3fs>=2025.3"],  # --save_to s3://...; gcsfs for gs://, adlfs for az://
        "mlflow": ["mlflow-skinny>=3.17,<4"],
        "dev": (ROOT / "requirements-dev.txt").read_text().splitlines(),
    },
)
