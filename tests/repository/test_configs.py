"""configs/: every ready config is in the table, its command loads, and its plan has the figures of
its head comment and fits."""

import dataclasses
import gc
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from conftest import REPOSITORY
from model_shapes import CONFIGS, PARAMETERS, write_config

from llama_ft.config import Config, ModelConfig, load
from llama_ft.plan.fit import USABLE
from llama_ft.plan.flags import GPUS
from llama_ft.plan.predict import predict
from llama_ft.plan.types import PlanRequest

FOLDER = REPOSITORY / "configs"
README = (FOLDER / "README.md").read_text()
EXAMPLES = REPOSITORY / "examples" / "README.md"
DEMOS = ("demo", "quickstart")  # they name no hardware
CONFIG_FILES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml")) if file.stem not in DEMOS}
# The least that torch sees of a card so called: an L4's or A10G's 21.9 GiB, an A100's or H100's
# 79.1.
CARDS = {"4gb": 3.7, "24gb": min(GPUS["l4"], GPUS["rtx4090"]), "80gb": GPUS["h100"]}
# One of each method, size and kind of model. The others take as long, 5 to 80 s, and are marked large.
PLANNED_ALWAYS = {"llama3.1_8b_full_8x80gb"}
SLOW = {
    "gemma3_4b_lora_24gb",
    "llama3.1_8b_4bit_24gb",
    "llama3.1_8b_4bit_4gb",
    "llama3.1_8b_8bit_24gb",
    "llama3.1_8b_dpo_lora_80gb",
    "llama3.1_8b_full_2x8x80gb",
    "llama3.2_1b_full_24gb",
    "llama3.3_70b_lora_8x80gb",
    "qwen3_8b_lora_24gb",
}
SLOW_EXAMPLES = {"charts_qwen3_vl", "support_tickets", "ultrafeedback_dpo"}
ROW = re.compile(r"^\| \[`([^`]+)`\]\(([^)]+)\) \|(.*)\|$", re.MULTILINE)


def example_row(file: Path) -> str:
    """The row of an example, whose last cell is the planned GiB."""
    return rf"\]\({re.escape(file.name)}\) .* \| ([\d.]+) \|\n"


class Hardware(NamedTuple):
    """What a config's name ends in: 2x8x80gb are two nodes of eight cards of 80 GB."""

    nodes: int
    ranks_of_node: int
    card: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_of_node

    @property
    def usable_bytes(self) -> float:
        return USABLE * CARDS[self.card] * 2**30


def marks_of(stem: str) -> list[pytest.MarkDecorator]:
    if stem in PLANNED_ALWAYS:
        return []
    return [pytest.mark.slow if stem in SLOW else pytest.mark.large]


def hardware_of(stem: str) -> Hardware:
    *counts, card = stem.rpartition("_")[2].split("x")
    nodes, ranks = [1, 1, *map(int, counts)][-2:]
    return Hardware(nodes, ranks, card)


def head_of(stem: str) -> str:
    """A config's head comment, without its signs."""
    lines = CONFIG_FILES[stem].read_text().partition("\nmodel:")[0].splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def command_of(stem: str) -> list[str]:
    """The head comment's command for training."""
    text = re.sub(r"\\\n\s*", "", head_of(stem))
    [command] = re.findall(
        r"^ +(llama-ft train .*|torchrun .*recipes/finetuning\.py .*)$", text, re.MULTILINE
    )
    return shlex.split(command)


def planned_of(stem: str) -> tuple[str, tuple[float, ...]]:
    """The head comment's command for planning, and what it says comes out: GiB a rank on the GPU
    and on the host, of a checkpoint, and of the result."""
    command, numbers = re.findall(
        r"^Planned by (llama-ft .*):\n +(.*)$", head_of(stem), re.MULTILINE
    )[0]
    return command, tuple(float(number) for number in re.findall(r"([\d.]+) GiB", numbers))


def rows() -> dict[str, list[str]]:
    """The tables' rows by config."""
    found = ROW.findall(README)
    assert all(name + ".yaml" == link for name, link, _ in found)
    assert len({name for name, _, _ in found}) == len(found)
    return {name: [cell.strip() for cell in cells.split("|")] for name, _, cells in found}


def test_the_tables_list_every_config() -> None:
    assert rows().keys() == CONFIG_FILES.keys()
    assert len(CONFIG_FILES) >= 14
    assert all(f"]({name}.yaml)" in README for name in DEMOS)


@pytest.mark.parametrize("stem", CONFIG_FILES)
def test_the_table_has_the_settings_of_the_config(stem: str) -> None:
    config, _ = load([f"--config={CONFIG_FILES[stem]}"], paths=False)
    method, context_length, planned, tokens, checkpointing = rows()[stem][-5:]
    bits = config.quantization.mode
    assert ("LoRA" in method) == config.peft.use_peft
    named = {"8bit": ["8-bit"], "4bit": ["4-bit"], "as_stored": ["as stored"], "none": []}
    assert [kind for kind in ("8-bit", "4-bit", "as stored") if kind in method] == named[bits]
    assert stem.split("_")[-2] == (
        bits.removeprefix("as_") if bits != "none" else "lora" if config.peft.use_peft else "full"
    )
    train = config.train
    length = config.data.context_length
    assert checkpointing == (train.activation_checkpointing or "auto")
    assert length is not None and context_length == f"{length:,}"
    step = (
        train.batch_size_training
        * train.gradient_accumulation_steps
        * length
        * hardware_of(stem).ranks
    )
    # the chosen and the rejected response of a pair
    step *= 1 if config.preference.objective == "sft" else 2
    assert tokens == f"{step:,}"
    assert 16_000 <= step <= 200_000
    assert float(planned) == planned_of(stem)[1][0]
    assert config.model.model_name in head_of(stem) or config.model.model_name in CONFIGS


def test_the_readme_has_the_planned_figures() -> None:
    shown = re.findall(
        r"\(configs/(\S+)\.yaml\) \| ([\d,]+) \| ([\d.]+) \| (\w+) \|",
        (REPOSITORY / "README.md").read_text(),
    )
    assert len(shown) >= 10
    for stem, length, planned, checkpointing in shown:
        assert [length, planned, checkpointing] == [rows()[stem][column] for column in (-4, -3, -1)]


def test_the_page_of_this_years_models_has_the_planned_figures() -> None:
    page = (REPOSITORY / "docs" / "getting-started" / "this-years-models.md").read_text()
    shown = re.findall(r"\| `(\S+)` \| .* \| ([\d.]+) \| \[`(\S+)`\]", page)
    assert len(shown) >= 3
    for model, planned, stem in shown:
        config, _ = load([f"--config={CONFIG_FILES[stem]}"], paths=False)
        assert config.model.model_name == model
        assert rows()[stem][-3] == planned


@pytest.mark.parametrize("file", sorted(EXAMPLES.parent.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_loads_and_is_in_their_table(file: Path) -> None:
    config, _ = load([f"--config={file}"], paths=False)
    assert config.data.validation is not None or config.data.dataset == "samsum"
    assert len(re.findall(example_row(file), EXAMPLES.read_text())) == 1


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            marks=pytest.mark.slow if file.stem in SLOW_EXAMPLES else pytest.mark.large,
            id=file.stem,
        )
        for file in sorted(EXAMPLES.parent.glob("*.yaml"))
    ],
)
def test_the_plan_of_an_example_has_the_figure_of_the_table(
    file: Path, finetuning: ModuleType, tmp_path: Path
) -> None:
    config, _ = load([f"--config={file}"], paths=False)
    request = request_for(config, Hardware(1, 1, "24gb"), tmp_path / "model")
    plan = predict(request, finetuning.RECIPE, quick=True)
    text = EXAMPLES.read_text()
    [planned] = re.findall(example_row(file), text)
    if file.stem.startswith("charts"):  # images are planned with the model's tokenizer, of the Hub
        [without_images] = re.findall(r"Without images they are ([\d.]+) and ([\d.]+)\.", text)
        planned = without_images[file.stem == "charts_gemma3"]
    assert plan.device_bytes / 2**30 == pytest.approx(float(planned), abs=0.051)


def advised_rates() -> list[tuple[str, float, float, float]]:
    """The table of the hyperparameters page: methods, the largest model in billions of parameters,
    and the lowest and highest learning rate."""
    page = (REPOSITORY / "docs" / "guides" / "hyperparameters.md").read_text()
    rows = []
    for line in page.partition("| method | model |")[2].partition("\n\n")[0].splitlines()[2:]:
        method, model, rate = (cell.strip() for cell in line.strip("|").split("|")[:3])
        rates = [float(value) for value in rate.split(" to ")]
        largest = float(re.findall(r"[\d.]+", model)[-1])
        rows.append((method, largest, rates[0], rates[-1]))
    return rows


@pytest.mark.parametrize("stem", CONFIG_FILES)
def test_the_learning_rate_is_the_one_that_the_documentation_advises(stem: str) -> None:
    config, _ = load([f"--config={CONFIG_FILES[stem]}"], paths=False)
    is_dpo = config.preference.objective == "dpo"
    weights = "LoRA" if config.peft.use_peft else "full"
    [billions] = re.findall(r"_e?([\d.]+)b_", stem)
    fitting = []
    for method, largest, low, high in advised_rates():
        is_same_method = ("DPO" in method) == is_dpo and weights in method
        if is_same_method and float(billions) <= largest:
            fitting.append((low, high))
    low, high = fitting[0]  # the rows of a method are sorted by size
    assert low <= config.train.lr <= high


@pytest.mark.parametrize(
    "stem", [*CONFIG_FILES, *(file.stem for file in EXAMPLES.parent.glob("*.yaml"))]
)
def test_an_adapter_has_the_scale_that_the_documentation_advises(stem: str) -> None:
    file = CONFIG_FILES.get(stem, EXAMPLES.parent / f"{stem}.yaml")
    config, _ = load([f"--config={file}"], paths=False)
    page = (REPOSITORY / "docs" / "guides" / "hyperparameters.md").read_text()
    method = "DPO, IPO, KTO with LoRA" if config.preference.objective == "dpo" else "LoRA, QLoRA"
    row = next(line for line in page.splitlines() if line.startswith(f"| {method} |"))
    [(rank, alpha)] = re.findall(r"--peft.r (\d+) --lora_alpha (\d+)", row)
    if config.peft.use_peft:
        assert config.peft.lora_alpha / config.peft.r == int(alpha) / int(rank)
        assert "lora_alpha:" in file.read_text()  # readers see it


@pytest.mark.parametrize("stem", CONFIG_FILES)
def test_the_commands_load_and_start_one_rank_per_gpu(stem: str) -> None:
    command = command_of(stem)
    hardware = hardware_of(stem)
    script = command.index("--config")
    config, _ = load(command[script:], paths=False)
    assert config.data.dataset == "my_data.jsonl"
    launcher = [word for word in command[:script] if word != "recipes/finetuning.py"]
    if hardware.nodes == 1:
        ranks = [] if hardware.ranks == 1 else ["--nproc", str(hardware.ranks)]
        assert launcher == ["llama-ft", "train", *ranks]
    else:
        assert launcher[0] == "torchrun"
        counts = dict(zip(launcher[1::2], launcher[2::2], strict=True))
        assert int(counts["--nproc_per_node"]) == hardware.ranks_of_node
        assert int(counts["--nnodes"]) == hardware.nodes
    assert config.fsdp.enable_fsdp == (hardware.ranks > 1 or config.fsdp.fsdp_cpu_offload)
    ranks = f" --nproc {hardware.ranks}" if hardware.ranks > 1 else ""
    assert planned_of(stem)[0] == f"llama-ft plan --config {stem}{ranks} --quick"


@pytest.mark.parametrize("name", PARAMETERS)
def test_model_shapes_have_the_parameter_counts_of_the_hub(name: str, tmp_path: Path) -> None:
    from llama_ft.models import build_on_meta, load_model_config

    skeleton = build_on_meta(
        load_model_config(write_config(tmp_path, name), False), ModelConfig(model_name=name)
    )
    assert sum(parameter.numel() for parameter in skeleton.model.parameters()) == PARAMETERS[name]


def request_for(config: Config, hardware: Hardware, folder: Path) -> PlanRequest:
    write_config(folder, config.model.model_name)
    local = dataclasses.replace(config.model, model_name=str(folder))
    config = dataclasses.replace(config, model=local)
    return PlanRequest(config, folder, hardware.ranks, hardware.ranks_of_node, "cuda")


@pytest.mark.parametrize(
    "stem",
    [pytest.param(stem, marks=marks_of(stem)) for stem in CONFIG_FILES],
)
def test_the_plan_has_the_figures_of_the_head_comment_and_fits(
    stem: str, finetuning: ModuleType, tmp_path: Path
) -> None:
    config, _ = load([f"--config={CONFIG_FILES[stem]}"], paths=False)
    hardware = hardware_of(stem)
    plan = predict(request_for(config, hardware, tmp_path / "model"), finetuning.RECIPE, quick=True)
    gc.collect()
    host_bytes = max(plan.host_load_bytes, plan.host_save_bytes)
    planned = (plan.device_bytes, host_bytes, plan.checkpoint_bytes, plan.result_bytes)
    assert [nbytes / 2**30 for nbytes in planned] == pytest.approx(planned_of(stem)[1], abs=0.051)
    assert plan.device_bytes <= hardware.usable_bytes
