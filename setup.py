"""Packaging: what is in src/, with the pinned requirements of requirements.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version in llama_ft/__init__.py, read without importing it: torch is not installed yet."""
    text = (ROOT / "src/llama_ft/__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("src/llama_ft/__init__.py has no __version__")
    return found.group(1)


setup(
    name="llama_ft",
    version=read_version(),
    description="Fine-tune open language models with PyTorch FSDP",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"llama_ft.report": ["*.html", "*.css", "*.js"]},
    python_requires=">=3.11",
    install_requires=(ROOT / "requirements.txt").read_text().splitlines(),
    extras_require={"gpu": ["liger-kernel==0.8.5"]},
)
