"""The recipe runs on an emulated GPU: tensors that say `cuda:0` and hold values on the CPU.

A tensor on the wrong device fails a run, and so does an operator without a kernel for CUDA. Each wait
of the host for the GPU is counted. A new one fails the test, with its line. Not emulated: streams,
memory, NCCL, and the arithmetic of CUDA's kernels.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from emulated_cuda.cases import (
    CASES,
    CASES_FILE,
    groups_of,
    run_job,
    run_recipe,
    step_of,
    stored_steps,
    without_lines,
)
from emulated_cuda.device import compile_guard
from image_models import FAMILIES

# What is measured of others differs by a few launches.
VERSIONS = ("2.13", "5.23")
OTHER_VERSIONS = 1.1  # most launches there, over the stored ones
FAST = ["LoRA", "full in bf16_pure", "LoRA on FP8", "kernels of capability 9.0"]
# One of each kind; a step of the others differs little from one of these.
SLOW = [
    "fsdp_cpu_offload",
    "activation_offload",
    "AdamW8bit",
    "QLoRA",
    "LoRA on 8 bits",
    "LoRA on MXFP4",
    "DPO",
    "KTO",
    "distillation",
    "GRPO",
    "GRPO, sampling",
    "scored answers",
    "experts, LoRA",
    "experts, QLoRA",
    "images Qwen3-VL",
    "kernels of capability 8.9",
    "2 ranks, full",
    "2 ranks, LoRA with FSDP",
    "2 ranks, shared sequences",
]
CASES_PER_LAUNCH = 12
# In fp32 the emulated GPU computes what the CPU does, to 7 digits; for pairs, whose losses are of
# differences, to 6.
EXACT = 3e-6
ROUNDED = 2e-2  # of bf16 and fp16, over fp32
Run = Callable[[str], list[Any]]  # the results of a case, rank by rank

STEPS = stored_steps()
LARGE = [name for name in STEPS if name not in (*FAST, *SLOW)]
PARAMETERS = [
    *FAST,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, marks=pytest.mark.large) for name in LARGE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled guard."""
    directory = tmp_path_factory.mktemp("emulated")
    compile_guard(directory)
    return directory


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Returns what a case did, which runs in one launch with others."""
    groups = [FAST, *groups_of(SLOW, len(SLOW)), *groups_of(LARGE, CASES_PER_LAUNCH)]

    @functools.cache
    def launch(number: int) -> dict[str, list[Any]]:
        return run_recipe(folder, groups[number])

    def results_of(name: str) -> list[Any]:
        number = next(number for number, names in enumerate(groups) if name in names)
        return launch(number)[name]

    return results_of


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_runs_on_the_gpu_and_waits_for_it_no_more_than_before(name: str, run: Run) -> None:
    results = run(name)
    for rank, result in enumerate(results):
        assert not result["error"], f"rank {rank}: {result['error']}"
        assert not result["problems"]
    stored = STEPS[name]
    step = step_of(results)
    new = {}
    for wait, count in results[0]["waits"].items():
        is_more = step["waits"][without_lines(wait)] > stored["waits"].get(without_lines(wait), 0)
        if is_more:
            new[wait] = count
    assert not new, f"the host waits for the GPU at new places, or more often: {new}"
    is_measured = torch.__version__.startswith(VERSIONS[0])
    is_measured &= transformers.__version__.startswith(VERSIONS[1])
    most = stored["launches"] * (1 if is_measured else OTHER_VERSIONS)
    assert step["launches"] <= most, results[0]["launches"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_losses_are_those_of_the_cpu(name: str, run: Run) -> None:
    result = run(name)[0]
    on_cpu = result["losses on the CPU"]
    assert len(on_cpu) == 2
    assert result["losses"] == pytest.approx(on_cpu, rel=ROUNDED)
    if CASES[name].is_exact:
        assert result["losses in fp32"] == pytest.approx(on_cpu, rel=EXACT)


@pytest.mark.parametrize("name", [name for name in STEPS if "images" in name])
def test_the_host_waits_at_most_3_times_per_micro_batch_with_images(name: str) -> None:
    assert sum(STEPS[name]["waits"].values()) <= 3  # the second step has one or two micro-batches


def test_every_case_of_the_file_is_stored() -> None:
    named = yaml.safe_load(CASES_FILE.read_text())
    assert list(STEPS)[: len(named)] == list(named)
    assert {f"images {family}" for family in FAMILIES} <= STEPS.keys()


# capability -> kernels of attention in bf16 (7.5: fp16), and whether one kernel multiplies all
# experts; AdamW is fused on all
KERNELS = {
    7.5: ("efficient attention", False),
    8.0: ("varlen attention", False),
    8.9: ("varlen attention", False),
    9.0: ("cudnn attention", True),
    10.0: ("cudnn attention", True),
    12.0: ("varlen attention", False),
}


@pytest.mark.parametrize(
    "capability",
    [
        9.0,
        pytest.param(8.9, marks=pytest.mark.slow),
        *(
            pytest.param(capability, marks=pytest.mark.large)
            for capability in (7.5, 8.0, 10.0, 12.0)
        ),
    ],
)
def test_each_generation_of_gpus_gets_its_kernels(capability: float, run: Run) -> None:
    launches = run(f"kernels of capability {capability}")[0]["launches"]
    attention, is_one_kernel = KERNELS[capability]
    all_attention = {name for name in launches if name.endswith("attention") or name == "sdpa"}
    assert all_attention == {attention}
    assert ("_grouped_mm" in launches) == is_one_kernel
    assert not {"mm of one group", "grouped_mm_fallback"} & set(launches)
    assert "_fused_adamw_" in launches


SNIPPETS = {
    "both devices": "torch.ones(2, device='cuda') + torch.ones(2)",
    "a number of the host": "torch.ones(2, device='cuda') + torch.tensor(2.0)",
    "meta": "torch.ones(2, device='cuda') + torch.ones(2, device='meta')",
    "an operator for CPUs": "x = torch.ones(2, 2, device='cuda'); torch.ops.llama_ft.rms_norm(x, x[0], 1e-6)",
    "numpy": "torch.ones(2, device='cuda').numpy()",
    "item": "torch.ones(2, device='cuda').sum().item()",
    "if": "if torch.ones(1, device='cuda') > 0: pass",
    "mask": "x = torch.ones(2, device='cuda'); x[x > 0]",
    "fill by a mask": "x = torch.ones(2, device='cuda'); x[x > 0] = 0.0",
    "pageable": "torch.ones(2).to('cuda')",
    "pinned": "torch.ones(2).pin_memory().to('cuda', non_blocking=True)",
    "list": "torch.tensor([1.0, 2.0], device='cuda')",
    "back": "torch.ones(2, device='cuda').cpu()",
    "matmul": "x = torch.ones(2, 2, device='cuda', requires_grad=True); (x @ x).sum().backward()",
}
ERRORS = {
    "both devices": "Expected all tensors to be on the same device: aten.add.Tensor got cuda:0 and cpu (2,)",
    "meta": "aten.add.Tensor got tensors on cuda:0 and meta",
    "an operator for CPUs": "llama_ft::rms_norm has no CUDA kernel",
    "numpy": "can't convert cuda:0 device type tensor to numpy",
}
WAITS = {
    "item": "_local_scalar_dense",
    "if": "_local_scalar_dense",
    "mask": "index with a mask",
    "pageable": "copy from pageable memory",
    "list": "tensor on the GPU",
    "back": "copy to the host",
}


@pytest.fixture(scope="module")
def snippets(folder: Path) -> dict[str, Any]:
    """What each of SNIPPETS did."""
    cases = {name: {"snippet": code, "capability": [9, 0]} for name, code in SNIPPETS.items()}
    return {name: results[0] for name, results in run_job(folder, cases).items()}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_emulated_gpu_raises_and_waits_as_cuda_does(
    name: str, snippets: dict[str, Any]
) -> None:
    result = snippets[name]
    expected = ERRORS.get(name, "")
    assert expected in result["error"] and bool(result["error"]) == bool(expected)
    if not expected:
        waits = [f"{wait} at <string>:1" for wait in (WAITS.get(name),) if wait]
        assert list(result["waits"]) == waits


ENDS = """
from unittest.mock import patch
from llama_ft.extensions.rollouts.sampling import EndsOfAnswers

late = iter([False, False, True, False, True, True, True])  # of the copies, as the host looks
with patch.object(torch.cuda.Event, "query", lambda _: next(late)):
    ends = EndsOfAnswers(5)
    unfinished = torch.ones(2, dtype=torch.long, device="cuda")
    assert not ends(unfinished)
    unfinished[0].zero_()
    assert not ends(unfinished)
    unfinished[1].zero_()
    assert not ends(unfinished)  # the first copy has arrived
    assert ends(unfinished)  # the second and the third one
assert [EndsOfAnswers(2)(unfinished + 1), EndsOfAnswers(1)(unfinished + 1)] == [False, True]
"""


def test_ends_of_answers_are_seen_without_a_wait(folder: Path) -> None:
    [result] = run_job(folder, {"ends": {"snippet": ENDS, "capability": [9, 0]}})["ends"]
    assert not result["error"] and not result["waits"]


def test_a_backward_pass_runs_on_the_gpu(snippets: dict[str, Any]) -> None:
    assert snippets["matmul"]["launches"]["mm"] == 3
