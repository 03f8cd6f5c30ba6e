"""Expandable segments of torch's allocator for CUDA are requested before anything starts CUDA."""

import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import run

from llama_ft.runtime import allocator
from llama_ft.runtime.allocator import (
    check_expandable_segments,
    is_wsl,
    request_expandable_segments,
)

GPU = torch.device("cuda", 0)
SETTING = "expandable_segments:True"
# A GPU that only says that it is there, for torch and for what bitsandbytes asks of it.
IMPORTS = """
import os
import torch

class Properties:
    name = gcnArchName = "GPU"
    major, minor, multi_processor_count, total_memory = 9, 0, 132, 2**36

def start_cuda():
    print("CUDA starts with", os.environ.get("PYTORCH_ALLOC_CONF"))

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = start_cuda
torch.cuda._get_device_properties = torch._C._cuda_getDeviceProperties = lambda *_: Properties
torch.version.cuda = "13.0"
try:
    import llama_ft.models
except Exception as error:
    print("without the libraries of CUDA:", error)
"""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without torch's variables. What a test sets is undone."""
    for name in allocator.VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator, "is_wsl", lambda: False)
    return monkeypatch


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.slow  # a new interpreter imports all libraries
def test_the_import_of_bitsandbytes_finds_the_variable_set() -> None:
    finished = run([sys.executable, "-c", IMPORTS])
    starts = [line for line in finished.output.splitlines() if line.startswith("CUDA starts")]
    assert starts and set(starts) == {f"CUDA starts with {SETTING}"}


def test_a_visible_gpu_gets_expandable_segments(variables: pytest.MonkeyPatch) -> None:
    see_gpus(variables, 1)
    request_expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == SETTING


def test_the_variable_is_not_set_without_a_gpu(variables: pytest.MonkeyPatch) -> None:
    see_gpus(variables, 0)
    request_expandable_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_the_users_own_setting_is_left_alone(name: str, variables: pytest.MonkeyPatch) -> None:
    see_gpus(variables, 1)
    variables.setenv(name, "max_split_size_mb:512")
    request_expandable_segments()
    assert os.environ[name] == "max_split_size_mb:512"
    assert [other for other in allocator.VARIABLES if other in os.environ] == [name]
    assert check_expandable_segments(GPU) == f"no expandable segments ({name})"


def test_wsl_is_known_by_its_kernel(tmp_path: Path) -> None:
    file = tmp_path / "osrelease"
    assert not is_wsl(file)
    file.write_text("6.8.0-31-generic\n")
    assert not is_wsl(file)
    file.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert is_wsl(file)


def test_wsl_gets_no_expandable_segments(variables: pytest.MonkeyPatch) -> None:
    see_gpus(variables, 1)
    variables.setattr(allocator, "is_wsl", lambda: True)
    request_expandable_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert check_expandable_segments(GPU) == "no expandable segments (WSL2)"


def test_a_gpu_whose_first_allocation_fails_does_without(variables: pytest.MonkeyPatch) -> None:
    settings = []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    variables.setenv("PYTORCH_ALLOC_CONF", SETTING)
    variables.setattr(torch, "empty", fail)
    variables.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    text = check_expandable_segments(GPU)
    assert text == "no expandable segments (CUDA driver error: operation not supported)"
    assert settings == ["expandable_segments:False"]
