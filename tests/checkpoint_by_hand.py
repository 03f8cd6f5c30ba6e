"""A checkpoint as a run of two ranks writes it, made without the code that writes them; what was
exported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from llama_ft.config import Config

RANKS = 2
IDS = torch.tensor([[1, 17, 42, 5, 99, 250, 3]])
METRICS = {
    "epoch": 1.5,
    "tokens": 12345,
    "train/loss": 1.25,
    "eval/loss": 1.5,
    "perf/step_seconds": 0.5,
}


def save_checkpoint(
    folder: Path, weights: dict[str, torch.Tensor], config: Config, step: int = 12, **more: object
) -> Path:
    """checkpoints/step-000012 as RANKS ranks write it, rows dealt as torch.chunk does; returns its
    folder."""
    folder = folder / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        own = {f"rng.{rank}.cpu": torch.get_rng_state()}
        offsets = {f"rng.{rank}.cpu": {"saved_offsets": [0]}}
        for name, tensor in weights.items():
            chunks = tensor.detach().chunk(RANKS)
            if rank < len(chunks):
                rows = {
                    f"model.{name}": chunks[rank].clone(),
                    f"optimizer.state.{name}.exp_avg": chunks[rank] * 0 + 1,
                }
                start = [rank * len(chunks[0]), *(0 for _ in tensor.shape[1:])]
                own = own | rows
                offsets = offsets | dict.fromkeys(rows, {"saved_offsets": start})
        header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        file = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({name: t.contiguous() for name, t in own.items()}, file, header)
    sections = dataclasses.asdict(config)
    trainer = {
        "format": 2,
        "step": step,
        "world_size": RANKS,
        "metrics": METRICS,
        "config": sections,
    }
    (folder / "trainer.json").write_text(
        json.dumps({**trainer, "chat_template": None, "versions": {}, **more})
    )
    files = sorted(folder.iterdir())
    sums = [f"{xxhash.xxh3_128(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "checksums.txt").write_text("".join(sums))
    return folder


def tuned(model: torch.nn.Module, frozen: str = "nothing") -> dict[str, torch.Tensor]:
    """Move every parameter that is trained, and return those by the names the project gives
    them."""
    torch.manual_seed(3)
    trained = {
        name: p for name, p in model.named_parameters() if p.requires_grad and frozen not in name
    }
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return {
        name.removeprefix("base_model.model."): parameter for name, parameter in trained.items()
    }


def load(folder: Path, **settings: Any) -> Any:
    """A model by transformers alone."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, **{"dtype": torch.float32, **settings}
    ).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder by the safetensors library alone."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
