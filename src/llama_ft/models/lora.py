"""Adapters through peft: injected into the skeleton without storage, given their first values shard by shard."""

import hashlib
import json
import math
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.lora_linear import use_fused_lora
from llama_ft.models.new_tokens import NewTokens, use_token_rows
from llama_ft.models.quantized import QuantizedLinear
from llama_ft.models.source import StoredTensor, listed

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # what peft puts before every name of the model it wraps
METHODS: dict[str, type[LoraConfig | LoHaConfig]] = {"LORA": LoraConfig, "LOHA": LoHaConfig}
# Names of what peft adds, and how it begins: another method of peft needs its names here and a branch in _new_config.
STARTS_UNIFORM = (".lora_A.", ".hada_w1_a.", ".hada_w1_b.", ".hada_w2_a.")
STARTS_NORMAL = (".lora_embedding_B.",)
STARTS_AT_ZERO = (".lora_B.", ".lora_embedding_A.", ".hada_w2_b.")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: what peft calls it and its tensors."""

    config: LoraConfig | LoHaConfig  # as saved in adapter_config.json
    keys: dict[str, str]  # parameter name in the model -> tensor name in adapter_model.safetensors


def inject_lora(model: PreTrainedModel, peft: PeftConfig, base_name: str, new: NewTokens | None = None) -> Adapter:
    """Freeze a skeleton and add (meta) adapters to the linear layers `peft` names, in place. A UserError if it has no
    such layers, they take no adapter of this kind, or a saved adapter cannot be continued.

    Args:
        model: on the meta device.
        peft: rank, targets and the rest; taken from the adapter's own file with from_peft_checkpoint.
        base_name: model name or folder to record in adapter_config.json.
        new: tokens whose rows of embedding and head are trained too.
    """
    saved = peft.from_peft_checkpoint
    settings = saved_config(Path(saved), tuple(METHODS)) if saved else _new_config(peft)
    settings.base_model_name_or_path = base_name
    _check_names(model, settings)
    if saved:
        _check_saved_rows(model, settings, new)
    elif new is not None and (rows := _rows_to_train(model, settings, new.ids)):
        if not isinstance(settings, LoraConfig):
            raise UserError(f"--resize_embeddings: {peft.peft_method} does not train single rows. Use lora.")
        settings.trainable_token_indices = rows
    if settings.target_modules == "all-linear":
        excluded = [n for n, m in model.named_modules() if not _takes_adapter(model, settings, n, m)]
        settings.exclude_modules = excluded or None
    return inject_adapter(model, settings)


def inject_adapter(model: PreTrainedModel, settings: LoraConfig | LoHaConfig) -> Adapter:
    """The part of inject_lora that peft does."""
    if any(isinstance(module, QuantizedLinear) for module in model.modules()) and (
        not isinstance(settings, LoraConfig) or settings.use_dora
    ):
        raise UserError("--quantization: DoRA and LoHa need the weights themselves at every step. Use plain LoRA.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of every meta tensor it does not initialise; we do, later
            adapted = get_peft_model(model, settings, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except (ValueError, TypeError, NotImplementedError, re.error) as error:
        hint = f"\n--peft.target_modules can be: {', '.join(linear_names(model))}." if settings.target_modules else ""
        raise UserError(f"peft cannot put these adapters into this model: {error}{hint}") from error
    use_token_rows(model)
    use_fused_lora(model)
    for name, module in model.named_modules():
        if getattr(module, "lora_magnitude_vector", None) and not isinstance(module.base_layer, nn.Linear):
            raise UserError(f"--peft.use_dora: {name} is no linear layer.")
    assert isinstance(adapted, PeftModel)
    # peft itself names the tensors: it is handed every parameter, and what it returns is traced back.
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    stored = get_peft_model_state_dict(adapted, state_dict=dict(parameters), save_embedding_layers=False)
    names = {id(parameter): name.removeprefix(PEFT_PREFIX) for name, parameter in adapted.named_parameters()}
    return Adapter(settings, {names[id(parameter)]: key for key, parameter in stored.items()})


def _new_config(peft: PeftConfig) -> LoraConfig | LoHaConfig:
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": peft.r, "target_modules": peft.target_modules}
    common["modules_to_save"] = peft.modules_to_save
    if peft.peft_method == "loha":
        for name in ("bias", "use_rslora", "use_dora", "init_lora_weights"):
            if getattr(peft, name) != getattr(PeftConfig(), name):
                raise UserError(f"--peft.{name}: peft_method loha has no such setting.")
        return LoHaConfig(**common, alpha=peft.lora_alpha)  # type: ignore[arg-type]  # fractions work
    common |= {name: getattr(peft, name) for name in ("lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora")}
    return LoraConfig(**common, init_lora_weights="gaussian" if peft.init_lora_weights == "gaussian" else True)


def saved_config(folder: Path, methods: tuple[str, ...] = ("LORA",)) -> Any:
    """The settings of the adapter saved in `folder`; a UserError if its method is not in `methods` (peft's names), or
    it cannot be read."""
    try:
        kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
        if kind not in methods:
            raise UserError(f"{folder}: {kind} adapters are not read here; only {' and '.join(methods)}.")
        settings = METHODS[kind].from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / ADAPTER_CONFIG}: cannot be used ({error}).") from error
    settings.inference_mode = False
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = True  # its weights are read from the file, whatever they first were
    return settings


def _rows_to_train(
    model: PreTrainedModel, lora: LoraConfig | LoHaConfig, ids: list[int]
) -> dict[str, list[int]] | None:
    """peft's trainable_token_indices: of the embedding and, unless it is tied to it, of the head; not of one that is
    trained in full."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    in_full = tuple(f".{name}" for name in lora.modules_to_save or ())
    names = [name for name, module in model.named_modules() if module is embedding or module is head]
    chosen = [name for name in names if not f".{name}".endswith(in_full)]
    if head is not None and head.weight is embedding.weight:
        if len(chosen) == 1:
            raise UserError("--peft.modules_to_save: embedding and head of this model are one. Name both or neither.")
        chosen = chosen[:1]
    return {name: ids for name in chosen} or None


def rows_trained(adapter: LoraConfig | LoHaConfig) -> set[int]:
    """Ids of the tokens whose rows an adapter trains by themselves."""
    indices = getattr(adapter, "trainable_token_indices", None) or {}
    return {id_ for ids in (indices.values() if isinstance(indices, dict) else [indices]) for id_ in ids}


def _check_saved_rows(model: PreTrainedModel, lora: LoraConfig | LoHaConfig, new: NewTokens | None) -> None:
    """A saved adapter trains the rows its own run found new: these must be there, and no others be new."""
    trained, rows = rows_trained(lora), cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    others = set(new.ids) - trained if new is not None and not lora.modules_to_save else set[int]()
    if others or max(trained, default=0) >= rows:
        raise UserError(
            f"--from_peft_checkpoint: this adapter trains the rows of {len(trained)} tokens. The model has {rows} rows "
            f"and {len(others)} new tokens that the adapter does not train.\nUse --resize_embeddings, and the "
            "adapter's folder as --tokenizer_name."
        )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of the linear layers that take an adapter, in order, without the head."""
    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    found = [n for n, m in model.named_modules() if isinstance(m, kinds) and m is not head and _is_linear(m)]
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in found))


def _takes_adapter(model: PreTrainedModel, settings: Any, name: str, module: nn.Module) -> bool:
    with suppress(ValueError):  # Mamba's kernels read the weight of out_proj and never call the layer
        _check_lora_target_modules_mamba(settings, model, name.rsplit(".", 1)[-1])
        return _is_linear(module)
    return False


def _is_linear(module: nn.Module) -> bool:
    """Whether a linear layer computes [..., in] -> [..., out]. Some classes derived from nn.Linear do not: Llama 4's
    router returns a tuple, DeepSeek V4's grouped layer takes one more dimension."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(module, nn.Linear) or forward in (nn.Linear.forward, QuantizedLinear.forward):
        return True
    try:
        output = module(module.weight.new_empty(2, module.in_features))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, module.out_features)


def _check_names(model: PreTrainedModel, settings: LoraConfig | LoHaConfig) -> None:
    """peft ignores a name without a match as long as another one has one; here every name must match. A module to save
    cannot be quantized."""
    modules = {f".{name}": module for name, module in model.named_modules()}
    targets = [] if isinstance(settings.target_modules, str) else settings.target_modules
    for setting, names in {"target_modules": targets, "modules_to_save": settings.modules_to_save}.items():
        found = {name: [m for full, m in modules.items() if full.endswith(f".{name}")] for name in sorted(names or ())}
        if absent := [name for name, matches in found.items() if not matches]:
            known = ", ".join(linear_names(model))
            raise UserError(f"--peft.{setting} [{', '.join(absent)}]: not in this model. It has: {known}.")
        if setting == "modules_to_save" and any(isinstance(m, QuantizedLinear) for ms in found.values() for m in ms):
            raise UserError("--peft.modules_to_save: quantized weights cannot be trained. Name them in --skip_modules.")


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter was added by peft, so that the model's own checkpoint does not hold it."""
    return any(part in name for part in (".lora_", ".hada_", ".trainable_tokens_delta."))


def checkpoint_key(name: str) -> str:
    """The name a parameter has in the model's own checkpoint, whatever peft has wrapped around it."""
    key = name.replace("token_adapter.", "")
    key = key.replace("base_layer.", "")  # peft puts one into another around two parameters of one module
    return key.replace(".original_module.", ".").replace(".modules_to_save.default.", ".")


def check_saved_adapter(
    headers: dict[str, StoredTensor], model: PreTrainedModel, adapter: Adapter, file: Path, base: str = "--model_name"
) -> None:
    """Raise a UserError unless a saved adapter's tensors are those that the model's adapter needs."""
    needed = {adapter.keys[name]: tuple(p.shape) for name, p in model.named_parameters() if name in adapter.keys}
    stored = {key: header.shape for key, header in headers.items()}
    keys = sorted(needed.keys() | stored.keys())
    wrong = [f"{it} {stored.get(it)} for {needed.get(it)}" for it in keys if needed.get(it) != stored.get(it)]
    if wrong:
        raise UserError(f"{file}: does not fit {base}; was it trained on another model?\nIt has {listed(wrong)}.")


def initial_rows(name: str, shape: tuple[int, ...], gaussian: bool, seed: int, rows: slice) -> torch.Tensor:
    """Rows of an adapter matrix's first value in fp32, a function of (seed, name) only: the same on any mesh.

    As peft initialises: LoRA's A Kaiming uniform with a = sqrt(5) or normal with deviation 1/r, B zero; the other way
    round for embeddings. Of LoHa's four factors the last is zero. A UserError for a parameter that is not known here:
    zero could keep it from ever changing anything.
    """
    value = torch.zeros(shape)
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7]))
    if gaussian and ".lora_A." in name:
        nn.init.normal_(value, std=1 / shape[0], generator=generator)
    elif any(part in name for part in STARTS_UNIFORM):
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif any(part in name for part in STARTS_NORMAL):
        nn.init.normal_(value, generator=generator)
    elif not any(part in name for part in STARTS_AT_ZERO):
        raise UserError(f"--use_peft: no first value is known of {name}. Install the peft of requirements.txt.")
    return value[rows]
