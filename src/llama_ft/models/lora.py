"""LoRA adapters through peft: injected into the skeleton without storage, given their first values shard by shard."""

import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.lora_linear import use_fused_lora
from llama_ft.models.quantized import QuantizedLinear
from llama_ft.models.source import StoredTensor
from llama_ft.models.token_rows import NewTokens, use_token_rows
from llama_ft.runtime.console import log

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # what peft puts before every name of the model it wraps
NORM_ROWS = 1024  # rows whose norm is taken at once, to bound the fp32 copy


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: what peft calls it and its tensors.

    Attributes:
        config: as saved in adapter_config.json.
        keys: parameter name in the model -> tensor name in adapter_model.safetensors.
    """

    config: LoraConfig
    keys: dict[str, str]


def inject_lora(model: PreTrainedModel, peft: PeftConfig, base_name: str, new: NewTokens | None = None) -> Adapter:
    """Freeze the model and put (meta) adapters beside the linear layers `peft` names, in place.

    Args:
        model: skeleton on the meta device.
        peft: rank, targets and the rest; taken from the adapter's own file with from_peft_checkpoint.
        base_name: model name or folder to record in adapter_config.json.
        new: tokens whose rows of embedding and head are trained too.

    Raises:
        UserError: a target or a module to save that the model does not have, a saved adapter that cannot be continued,
            DoRA on layers where its norms do not lie within a row, rows to train where peft cannot.
    """
    lora = saved_config(Path(peft.from_peft_checkpoint)) if peft.from_peft_checkpoint else _new_config(peft)
    lora.base_model_name_or_path = base_name
    _check_names(model, lora)
    if peft.from_peft_checkpoint:
        _check_saved_rows(model, lora, new)
    elif new is not None:
        lora.trainable_token_indices = _rows_to_train(model, lora, new.ids)
    if lora.target_modules == "all-linear":
        lora.exclude_modules = [n for n, m in model.named_modules() if not _takes_adapter(model, lora, n, m)] or None
    return inject_adapter(model, lora)


def inject_adapter(model: PreTrainedModel, lora: LoraConfig) -> Adapter:
    """The part of inject_lora that peft does."""
    _check_quantized(model, lora)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of every meta tensor it does not initialise; we do, later
            adapted = get_peft_model(model, lora, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        hint = "\n--lora_dropout 0 lets it." if "lora_dropout" in str(error) else ""
        if "trainable_token_indices" in str(error):
            hint = (
                "\n--peft.target_modules has a layer whose rows --resize_embeddings trains. Name embedding or head in "
                "--peft.modules_to_save instead."
            )
        raise UserError(f"peft cannot put these adapters into this model: {error}{hint}") from error
    use_token_rows(model)
    use_fused_lora(model)
    if lora.use_dora:
        _check_dora(model)
    assert isinstance(adapted, PeftModel)
    _tell_of_ranks_above_widths(model)
    return Adapter(lora, _adapter_keys(adapted))


def _tell_of_ranks_above_widths(model: nn.Module) -> None:
    """A product of matrices has no more than the smallest of their sides as its rank."""
    widths = {
        name: (max(layer.r.values()), min(layer.in_features or 0, layer.out_features or 0))
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and layer.r
    }
    above = {name: width for name, (rank, width) in widths.items() if rank > width}
    if above:
        name, width = next(iter(above.items()))
        log.warning(
            f"peft.r is {widths[name][0]}, and {len(above)} of {len(widths)} adapted layers are narrower ({name}: "
            f"{width}): their adapters need more memory than the layers, and can say no more than with that width."
        )


def _new_config(peft: PeftConfig) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=peft.r,
        lora_alpha=peft.lora_alpha,  # type: ignore[arg-type]  # peft's annotation; fractions work
        lora_dropout=peft.lora_dropout,
        target_modules=peft.target_modules,
        bias=peft.bias,
        use_rslora=peft.use_rslora,
        use_dora=peft.use_dora,
        modules_to_save=peft.modules_to_save,
        init_lora_weights="gaussian" if peft.init_lora_weights == "gaussian" else True,
    )


def saved_config(folder: Path) -> LoraConfig:
    """The settings of a saved adapter.

    Raises:
        UserError: not a LoRA, or not readable.
    """
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text())
        if settings.get("peft_type") != "LORA":
            raise UserError(f"{folder}: a {settings.get('peft_type')} adapter; only LORA ones are read here.")
        lora = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / ADAPTER_CONFIG}: cannot be used ({error}).") from error
    lora.inference_mode = False
    lora.init_lora_weights = True  # its weights are read from the file, whatever they first were
    return lora


def _rows_to_train(model: PreTrainedModel, lora: LoraConfig, ids: list[int]) -> dict[str, list[int]] | None:
    """peft's trainable_token_indices: of the embedding and, unless it is tied to it, of the head; not of one that is
    trained in full."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    in_full = tuple(f".{name}" for name in lora.modules_to_save or ())
    names = [name for name, module in model.named_modules() if module is embedding or module is head]
    chosen = [name for name in names if not f".{name}".endswith(in_full)]
    if head is not None and head.weight is embedding.weight:
        if len(chosen) == 1:
            raise UserError(
                f"--peft.modules_to_save: embedding and head of this model are one, and both get new rows. Name "
                f"{chosen[0].rsplit('.', 1)[-1]} too, or neither."
            )
        chosen = chosen[:1]
    return {name: ids for name in chosen} or None


def rows_trained(lora: LoraConfig) -> set[int]:
    """Ids of the tokens whose rows an adapter trains by themselves."""
    indices = lora.trainable_token_indices or {}
    return {id_ for ids in (indices.values() if isinstance(indices, dict) else [indices]) for id_ in ids}


def _check_saved_rows(model: PreTrainedModel, lora: LoraConfig, new: NewTokens | None) -> None:
    """A saved adapter trains the rows its own run found new: these must be there, and no others be new."""
    trained, rows = rows_trained(lora), cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if trained and max(trained) >= rows:
        raise UserError(
            f"--from_peft_checkpoint: this adapter trains the row of token {max(trained)}, and the model has {rows}.\n"
            "--resize_embeddings adds rows for the tokens of --tokenizer_name, which can be the adapter's own folder."
        )
    if new is not None and (others := set(new.ids) - trained) and not lora.modules_to_save:
        raise UserError(
            f"--from_peft_checkpoint: {len(others)} tokens are new to the model, such as {min(others)}, and this "
            "adapter does not train their rows.\nrecipes/export.py merges it into its model, beside which another can "
            "begin."
        )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of the linear layers an adapter can be put beside, in order, without the head."""
    head = model.get_output_embeddings()
    names = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and _is_linear(module)
    ]
    return list(dict.fromkeys(names))


def _takes_adapter(model: PreTrainedModel, lora: LoraConfig, name: str, module: nn.Module) -> bool:
    try:
        _check_lora_target_modules_mamba(lora, model, name.rsplit(".", 1)[-1])
    except ValueError:  # Mamba's kernels read the weight of out_proj and never call the layer
        return False
    return _is_linear(module)


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


def _check_names(model: PreTrainedModel, lora: LoraConfig) -> None:
    """peft ignores a name without a match as long as another one has one; here every name must match."""
    every_name = [name for name, _ in model.named_modules()]
    targets = lora.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        _check_pattern(targets, every_name, model)
    asked = {"peft.target_modules": [] if isinstance(targets, str) else sorted(targets or ())}
    asked["peft.modules_to_save"] = sorted(lora.modules_to_save or ())
    for flag, wanted in asked.items():
        absent = [w for w in wanted if not any(name == w or name.endswith(f".{w}") for name in every_name)]
        if absent:
            raise UserError(
                f"--{flag} [{', '.join(absent)}]: no linear layer of this model ends in "
                f"{', '.join(repr(name) for name in absent)}.\nIt has: {', '.join(linear_names(model))}."
                if flag == "peft.target_modules"
                else f"--{flag} [{', '.join(absent)}]: this model has no module of that name."
            )


def _check_pattern(pattern: str, every_name: list[str], model: PreTrainedModel) -> None:
    try:
        matches = any(re.fullmatch(pattern, name) for name in every_name)
        problem = "" if matches else "no module's whole name matches this pattern"
    except re.error as error:
        problem = f"not a regular expression ({error})"
    if problem:
        raise UserError(
            f"--peft.target_modules {pattern}: {problem}.\nA pattern is as in .*layers\\.[0-7]\\.self_attn\\.q_proj; "
            f"plain names are {', '.join(linear_names(model))}."
        )


def _check_quantized(model: PreTrainedModel, lora: LoraConfig) -> None:
    """A quantized layer can neither be trained in full nor lend its weight to DoRA."""
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    for wanted in lora.modules_to_save or ():
        if any(f".{name}".endswith(f".{wanted}") for name in quantized):
            raise UserError(
                f"--peft.modules_to_save: {wanted} is quantized, and quantized weights cannot be trained.\n"
                f"--skip_modules {wanted} leaves it as it is."
            )
    if lora.use_dora and quantized:
        raise UserError(
            "--peft.use_dora: DoRA needs the weights themselves at every step, and this model's are quantized.\n"
            "Use plain LoRA."
        )


def _check_dora(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if getattr(module, "lora_magnitude_vector", None) and not isinstance(module.base_layer, nn.Linear):
            raise UserError(
                f"--peft.use_dora: {name} is a {type(module.base_layer).__name__}; DoRA works on linear layers only.\n"
                "Leave it out of --peft.target_modules."
            )


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter was added by peft, so that the model's own checkpoint does not hold it."""
    return ".lora_" in name or ".trainable_tokens_delta." in name


def checkpoint_key(name: str) -> str:
    """The name a parameter has in the model's own checkpoint, whatever peft has wrapped around it."""
    key = name.replace("token_adapter.", "")
    key = key.replace("base_layer.", "")  # peft puts one into another around two parameters of one module
    return key.replace(".original_module.", ".").replace(".modules_to_save.default.", ".")


def _adapter_keys(adapted: PeftModel) -> dict[str, str]:
    """Adapter.keys. peft itself does the naming: it is handed every parameter, and what it returns is traced back."""
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    saved = get_peft_model_state_dict(adapted, state_dict=dict(parameters), save_embedding_layers=False)
    names = {id(parameter): name.removeprefix(PEFT_PREFIX) for name, parameter in adapted.named_parameters()}
    return {names[id(parameter)]: key for key, parameter in saved.items()}


def check_saved_adapter(
    headers: dict[str, StoredTensor], model: PreTrainedModel, adapter: Adapter, file: Path, base: str = "--model_name"
) -> None:
    """Compare a saved adapter's tensors with those the model's adapter needs.

    Raises:
        UserError: tensors are missing, too many or of another shape.
    """
    shapes = {adapter.keys[name]: tuple(p.shape) for name, p in model.named_parameters() if name in adapter.keys}
    wrong = [f"{key} is missing" for key in shapes if key not in headers]
    wrong += [f"{key} is not part of this adapter" for key in headers if key not in shapes]
    wrong += [
        f"{key} is {list(headers[key].shape)}, expected {list(shape)}"
        for key, shape in shapes.items()
        if key in headers and headers[key].shape != shape
    ]
    if wrong:
        more = [f"... and {len(wrong) - 5} more"] if len(wrong) > 5 else []
        heading = f"{file}: does not fit {base}; was it trained on another model?"
        raise UserError("\n".join([heading, *wrong[:5], *more]))


def initial_rows(name: str, shape: tuple[int, ...], gaussian: bool, seed: int, rows: slice) -> torch.Tensor:
    """Rows of an adapter matrix's first value in fp32, a function of (seed, name) only: the same on any mesh.

    As peft initialises: A Kaiming uniform with a = sqrt(5) or normal with deviation 1/r, B zero; the other way round
    for embeddings.

    Raises:
        UserError: a parameter that other versions of peft add. Zero could keep it from ever changing anything.
    """
    if not any(known in name for known in (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")):
        raise UserError(
            f"--use_peft: the first value of {name}, which peft has added, is not known.\n"
            "Install a version of peft that requirements.txt names."
        )
    value = torch.zeros(shape)
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7]))
    if ".lora_A." in name:
        if gaussian:
            nn.init.normal_(value, std=1 / shape[0], generator=generator)
        else:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        nn.init.normal_(value, generator=generator)
    return value[rows]


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """DoRA's first magnitudes: the L2 norm of each row [rows, in] -> [rows], fp32, a block of rows at a time."""
    blocks = [torch.linalg.vector_norm(block.float(), dim=1) for block in weight.split(NORM_ROWS)]
    return torch.cat(blocks) if blocks else weight.new_zeros(0, dtype=torch.float32)
