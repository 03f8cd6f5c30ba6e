"""A server of a base model that loads adapters while it runs, as vLLM does, computes with them by PEFT,
and fails in the ways of servers."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rollout_server import RolloutServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CONTEXT = 64


class LoraServer(RolloutServer):
    """Answers requests for the model `base` and for adapters.

    Args:
        folder: of the base model.
        fault: one of the names in this class and in RolloutServer; "" for none.

    Attributes:
        loaded: the names of all adapters that were ever loaded, in order.
        weights: of each of them.
        adapters: those that it has now.
        forgets: the number of requests after which all adapters are lost, once.
        before_answer: called with each request for an answer.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.folder = folder
        super().__init__(self._base(), fault)
        self.loaded = list[str]()
        self.weights = dict[str, dict[str, torch.Tensor]]()
        self.adapters = dict[str, Any]()
        self.forgets: int | None = None
        self.before_answer: Callable[[dict[str, Any]], None] = lambda request: None
        self._lock = threading.Lock()

    def _base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, object]:
        if path == "/v1/models":
            base = {"id": "base", "root": str(self.folder), "max_model_len": CONTEXT}
            cards = [
                {"id": name, "parent": "base", "max_model_len": None} for name in self.adapters
            ]
            return 200, {"data": [base, *cards]}
        if path == "/v1/load_lora_adapter" and self.fault != "no route":
            return self._load(json.loads(body))
        if path == "/v1/unload_lora_adapter":
            with self._lock:
                self.adapters.pop(json.loads(body)["lora_name"], None)
            return 200, b"Success: removed"
        if path != "/v1/completions":
            return super().answer(path, authorization, body)
        self.before_answer(json.loads(body))
        with self._lock:
            if self.forgets is not None and len(self.requests) >= self.forgets:
                self.forgets = None
                self.adapters.clear()
            model = self.adapters.get(json.loads(body)["model"])
        if model is None:
            return 404, {"error": {"message": "The model does not exist."}}
        return super().answer(path, authorization, body)

    def _load(self, content: dict[str, Any]) -> tuple[int, object]:
        name = content["lora_name"]
        folder = Path(content["lora_path"])
        weights = load_file(folder / "adapter_model.safetensors") if folder.is_dir() else {}
        before = self.weights.get(name, weights)
        if any(not before[key].equal(weights[key]) for key in weights):
            return 400, {"error": {"message": f"'{name}' was loaded before with other weights."}}
        if self.fault == "rank":
            return 500, {"error": {"message": "LoRA rank 8 is greater than max_lora_rank 4."}}
        if self.fault == "no disk" or not folder.is_absolute():
            return 404, {"error": {"message": f"No adapter found for '{name}' at {folder}"}}
        base = self._base()
        if self.fault == "other base":
            with torch.no_grad():
                for layer in base.model.layers:
                    layer.mlp.down_proj.weight.mul_(0.5)
        model: Any = base
        if self.fault != "ignores":
            model = PeftModel.from_pretrained(base, folder).eval()
        if self.fault == "half":
            for module in model.modules():
                if hasattr(module, "lora_A"):
                    module.scaling["default"] /= 2
        if self.fault == "accepts":
            return 200, b"Success"
        with self._lock:
            self.loaded.append(name)
            self.weights[name] = weights
            self.adapters[name] = model
        return 200, f"Success: LoRA adapter '{name}' added successfully.".encode()

    def model_of(self, content: dict[str, Any]) -> Any:
        return self.adapters[content["model"]]
