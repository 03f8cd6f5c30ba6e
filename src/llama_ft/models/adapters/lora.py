"""Adapters of PEFT: added to the model on the meta device, and initialized shard by shard."""

import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftType, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import get_pattern_key
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers as convert_adapter,
)
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.libraries.evidence import is_experts
from llama_ft.models.adapters.adapter_config import saved_config
from llama_ft.models.adapters.lora_experts import use_split_experts
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.models.adapters.names import PEFT_PREFIX, checkpoint_key
from llama_ft.models.adapters.pissa import check_pissa, doubled_rank
from llama_ft.models.architecture.new_tokens import use_token_rows
from llama_ft.models.base.layers import SCORE, decoder_layers, read_linears
from llama_ft.models.base.source import listed
from llama_ft.models.built import Adapter, BuiltModel, NewTokens
from llama_ft.models.quantization.layers import QuantizedLinear, quantized_weights

# fields of PeftConfig
NON_PEFT_FIELDS = {"use_peft", "peft_method", "from_peft_checkpoint", "lora_alpha", "options"}


def inject_lora(
    built: BuiltModel, peft: PeftConfig, base_name: str, new: NewTokens | None = None
) -> Adapter:
    """Freeze a model on the meta device, and add adapters to the linear layers that `peft` names,
    in place. Raises UserError if there are no such layers, they do not support this adapter, or a
    saved adapter cannot be continued.

    Args:
        built: the model on the meta device, and what its text part and its head are.
        peft: rank, targets and so on; with from_peft_checkpoint they come from the adapter's own
            file.
        base_name: model name or directory for adapter_config.json.
        new: tokens whose rows of embedding and LM head are trained, too.
    """
    model = built.model
    saved = peft.from_peft_checkpoint
    settings = saved_config(Path(saved)) if saved else _new_config(peft)
    # PEFT's own forward passes find the tokens after which such an adapter has an effect
    if getattr(settings, "alora_invocation_tokens", None):
        raise UserError(
            "alora_invocation_tokens: adapters that begin after certain tokens (aLoRA) are not supported."
        )
    settings.base_model_name_or_path = base_name
    # trained whole; "classifier" is what PEFT adds to the name for models of other classes
    if built.has_score:
        whole = {SCORE, *(settings.modules_to_save or ())} - {"classifier"}
        settings.task_type = "SEQ_CLS"
        settings.modules_to_save = sorted(whole)
    modules = dict(model.named_modules())
    projectors = [name for name in built.trained_towers if name in modules]
    if projectors and not saved:
        settings.modules_to_save = [*(settings.modules_to_save or ()), *projectors]
    # Of a saved adapter, the tensors are checked when they are loaded. PEFT adds names to its settings
    # that some models of an architecture lack.
    if not saved:
        _check_names(model, settings)
    _check_excluded(model, peft)
    if saved:
        size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        others = {id_ for id_ in rows_trained(settings) if id_ >= size}
        if others:
            problem = f"this adapter trains {len(others)} new tokens that the model, of {size} tokens, lacks"
            raise UserError(
                f"--from_peft_checkpoint: {problem}. Use --resize_embeddings and its --tokenizer_name."
            )
    elif new is not None:
        rows = _rows_to_train(model, settings, new.ids)
        if rows is not None and not isinstance(settings, LoraConfig):
            raise UserError(
                f"--resize_embeddings: {peft.peft_method} cannot train single tokens. Use lora."
            )
        if rows is not None:
            settings.trainable_token_indices = rows
    if settings.target_modules == "all-linear":
        _target_all_linear(model, settings)
    _exclude_towers(built, settings, peft.options.get("exclude_modules", ()))
    adapter = inject_adapter(model, settings)
    _check_patterns(adapter, peft)
    if peft.init_lora_weights.startswith("pissa"):
        check_pissa(model, peft)
        return replace(adapter, trained_rank=peft.r)
    return adapter


def _exclude_towers(built: BuiltModel, settings: Any, ends: Sequence[str]) -> None:
    """Exclude the parts for images and sound from the settings of an adapter. `ends`: the ends of
    names that --exclude_modules names.

    The checkpoint's class has these parts, with layers of the same names, when PEFT loads the adapter
    into it.
    """
    towers = [*built.left_out.modules, *built.towers]
    if towers and not isinstance(settings.exclude_modules, str):
        already_excluded = settings.exclude_modules or ()
        names = [re.escape(name) for name in (*towers, *already_excluded)]
        names += [rf".*\.{re.escape(name)}" for name in ends]
        settings.exclude_modules = rf"({'|'.join(dict.fromkeys(names))})(\..+)?"
    elif towers and ends:
        names = [re.escape(name) for name in towers]
        settings.exclude_modules = rf"{settings.exclude_modules}|({'|'.join(names)})(\..+)?"


def _target_all_linear(model: PreTrainedModel, settings: Any) -> None:
    """Exclude layers that cannot have an adapter from PEFT's "all-linear", and add stacked experts,
    which it covers for some architectures only."""
    uncalled = read_linears(model)
    excluded = [
        name
        for name, module in model.named_modules()
        if module in uncalled or not _takes_adapter(model, settings, name, module)
    ]
    setting = settings.exclude_modules or ()  # in peft.options
    if isinstance(setting, str):
        names = [re.escape(name) for name in excluded]
        settings.exclude_modules = "|".join([f"({setting})", *names])
    else:
        settings.exclude_modules = [*setting, *excluded] or None
    if not isinstance(settings, LoraConfig) or settings.lora_dropout or settings.use_dora:
        return  # PEFT's adapters of experts have no dropout and no magnitudes
    experts = expert_names(model)
    if experts:
        settings.target_parameters = sorted({*experts, *(settings.target_parameters or ())})


def inject_adapter(model: PreTrainedModel, settings: Any) -> Adapter:
    """Add the adapters with PEFT."""
    if quantized_weights(model) and (not isinstance(settings, LoraConfig) or settings.use_dora):
        raise UserError(
            "--quantization: only plain LoRA is supported. Remove use_dora or peft_method loha."
        )
    whole = copy(settings.modules_to_save)  # which peft makes longer for a model with a score head
    # PEFT replaces it by the directory that the model was read from: of a Hub model, a cache's.
    base_name = settings.base_model_name_or_path
    try:
        with warnings.catch_warnings():
            # peft warns of every meta tensor it does not initialise; we do, later
            warnings.simplefilter("ignore")
            adapted: Any = get_peft_model(
                model, settings, low_cpu_mem_usage=True, autocast_adapter_dtype=False
            )
    except (ValueError, TypeError, NotImplementedError, RuntimeError, re.error) as error:
        hint = (
            f"\n--peft.target_modules can be: {', '.join(linear_names(model))}."
            if settings.target_modules
            else ""
        )
        if "ParamWrapper does not" in str(error):
            problem = "adapters of experts support neither lora_dropout nor use_dora. Remove them, or name layers"
            raise UserError(f"--use_peft: {problem}: --target_modules q_proj,v_proj.") from error
        raise UserError(f"peft cannot put these adapters into this model: {error}{hint}") from error
    settings.modules_to_save = whole
    settings.base_model_name_or_path = base_name
    use_token_rows(model)
    use_fused_lora(model)
    use_split_experts(model)
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, tuners_utils.BaseTunerLayer):
            layer: Any = copy(module)
            uses_dora = bool(getattr(layer, "lora_magnitude_vector", None))
            if uses_dora and not isinstance(layer.base_layer, nn.Linear):
                raise UserError(
                    f"--peft.use_dora: {name} is not a linear layer; DoRA needs one. Set --target_modules."
                )
            # A copy of the adapter alone: without the base layer.
            adapter_parts = {
                part: child
                for part, child in layer._modules.items()
                if part in layer.adapter_layer_names
            }
            layer._modules = deepcopy(adapter_parts)
            layers[name] = layer
    # PEFT names the tensors: it gets every parameter, and its result is matched with them.
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    stored = get_peft_model_state_dict(adapted, state_dict=parameters, save_embedding_layers=False)
    names = {
        id(parameter): name.removeprefix(PEFT_PREFIX)
        for name, parameter in adapted.named_parameters()
    }
    written = _names_that_load(adapted, settings, stored)
    keys = {}
    for key, parameter in stored.items():
        name = names[id(parameter)]
        keys[name] = written[key]
    return Adapter(settings, keys, layers)


def _names_that_load(
    adapted: Any, settings: Any, stored: dict[str, torch.Tensor]
) -> dict[str, str]:
    """Return PEFT's name of each tensor -> the name under which PEFT loads it. They differ if a
    renaming of Transformers, made for checkpoints, also matches PEFT's name: of Mistral Large 4,
    `experts` becomes `mlp.experts`, also within `mlp.experts`. Then the name in the checkpoint's
    layout loads.

    Raises:
        UserError: PEFT loads a tensor under none of these names.
    """
    written = {key: key for key in stored}

    def lost(names: dict[str, str]) -> list[str]:
        tensors = {name: stored[key] for key, name in names.items()}
        loaded = convert_adapter(adapted, settings, tensors)
        return [key for key in names if loaded.get(key) is not stored[key]]

    open_keys = lost(written)
    if not open_keys:
        return written
    transforms = get_model_conversion_mapping(adapted.get_base_model())
    renamings = [
        transform.reverse_transform()
        for transform in transforms
        if isinstance(transform, WeightRenaming)
    ]
    for renaming in renamings:
        names = {}
        for key in open_keys:
            renamed, _ = renaming.rename_source_key(key.removeprefix(PEFT_PREFIX))
            names[key] = PEFT_PREFIX + renamed
        open_keys = lost(names)
        written |= {key: name for key, name in names.items() if key not in open_keys}
    open_keys = lost(written)
    if open_keys:
        raise UserError(
            f"--use_peft: PEFT would not load these tensors of the adapter again: {listed(open_keys)}.\n"
            "Name other layers: --target_modules q_proj,v_proj."
        )
    return written


def _new_config(peft: PeftConfig) -> Any:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(peft.peft_method.upper())]
    supported = {field.name for field in fields(kind)}
    defaults = PeftConfig()
    names = [field.name for field in fields(peft) if field.name not in NON_PEFT_FIELDS]
    values = {name: getattr(peft, name) for name in names}
    changed = [name for name in names if values[name] != getattr(defaults, name)]
    lacking = [name for name in changed if name not in supported]
    if lacking:
        raise UserError(f"--peft.{lacking[0]}: peft_method {peft.peft_method} has no such setting.")
    values["task_type"] = "CAUSAL_LM"
    values["lora_alpha"] = peft.lora_alpha
    values["alpha"] = peft.lora_alpha  # LoHa's name of the same setting
    values["init_lora_weights"] = "gaussian" if peft.init_lora_weights == "gaussian" else True
    if peft.init_lora_weights.startswith("pissa"):
        values |= doubled_rank(peft)
    values |= deepcopy(peft.options)
    return kind(**{name: value for name, value in values.items() if name in supported})


def _rows_to_train(
    model: PreTrainedModel, lora: Any, ids: list[int]
) -> dict[str, list[int]] | None:
    """Return PEFT's trainable_token_indices for the embedding and, unless tied, the LM head; not
    for one that is trained as a whole."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    in_full = tuple(f".{name}" for name in lora.modules_to_save or ())
    ends = [name for name, module in model.named_modules() if module in (embedding, head)]
    chosen = [name for name in ends if not f".{name}".endswith(in_full)]
    if head is not None and head.weight is embedding.weight:
        if len(chosen) == 1:
            raise UserError(
                "--peft.modules_to_save: this model's embedding and LM head are tied. Name both or none."
            )
        chosen = chosen[:1]
    return {name: ids for name in chosen} or None


def rows_trained(adapter: Any) -> set[int]:
    """Return the ids of the tokens whose rows an adapter trains."""
    # PEFT takes a list for the embedding, or a list per name of a layer.
    indices = getattr(adapter, "trainable_token_indices", None) or {}
    if not isinstance(indices, dict):
        return set(indices)
    return set[int]().union(*indices.values())


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of the linear layers, in order, without the LM head."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    last_parts = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head
    ]
    return list(dict.fromkeys(last_parts))


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of experts that are stacked into one parameter [experts, ...], by their
    names in the checkpoint; without the scales of quantized ones."""
    parameters = {}
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and not part.endswith("_scale"):
                parameters[checkpoint_key(f"{name}.{part}")] = parameter
    return parameters


def expert_names(model: nn.Module) -> list[str]:
    """Return the names of these weights for target_parameters: experts.down_proj,
    experts.gate_up_proj."""
    last_two_parts = [name.split(".")[-2:] for name in expert_parameters(model)]
    return sorted({".".join(parts) for parts in last_two_parts})


def describe_experts(model: nn.Module) -> str | None:
    """Return a log text on whether the model's adapters cover its experts; None if it has no
    experts."""
    experts = expert_parameters(model)
    if not experts:
        return None
    adapted = {
        checkpoint_key(f"{name}.{module.parameter_name}")
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }
    if experts.keys() <= adapted:
        return f"LoRA adapts the experts, too: {', '.join(expert_names(model))}."
    flags = f"--target_parameters {','.join(expert_names(model))} --lora_dropout 0"
    return f"LoRA does not adapt {len(experts.keys() - adapted)} weights of experts. Add {flags} to adapt them."


def _takes_adapter(model: PreTrainedModel, settings: Any, name: str, module: nn.Module) -> bool:
    """Return whether a linear layer is called, and computes [..., in] -> [..., out]. Mamba's
    kernels read out_proj's weight instead. Llama 4's router returns a tuple, DeepSeek V4's grouped
    layer takes one more dimension."""
    forward = getattr(type(module), "forward", None)
    with suppress(RuntimeError, TypeError, ValueError, IndexError):
        # PEFT's private check of Mamba's layers, if this version has it.
        check = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        check(settings, model, name.rsplit(".", 1)[-1])
        if not isinstance(module, nn.Linear) or forward in (
            nn.Linear.forward,
            QuantizedLinear.forward,
        ):
            return True
        output = module(module.weight.new_empty(2, module.in_features))
        return isinstance(output, torch.Tensor) and output.shape == (2, module.out_features)
    return False


def _check_names(model: PreTrainedModel, settings: Any) -> None:
    """Check that every name matches; PEFT ignores a name without a match if another name
    matches."""
    modules = [f".{name}" for name, _ in model.named_modules()]
    targets = [] if isinstance(settings.target_modules, str) else settings.target_modules
    parameters = [f".{name}" for name, _ in model.named_parameters()]
    for name in getattr(settings, "target_parameters", None) or ():
        if not _ends_one(parameters, name):
            possible = ", ".join(expert_names(model)) or "no stacked weights of experts"
            raise UserError(
                f"--peft.target_parameters [{name}]: not in this model. It has: {possible}."
            )
    for setting, names in {
        "target_modules": targets,
        "modules_to_save": settings.modules_to_save,
    }.items():
        absent = [name for name in sorted(names or ()) if not _ends_one(modules, name)]
        if absent:
            kinds = nn.Embedding | nn.Linear
            last_parts = {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, kinds)
            }
            linears = linear_names(model)
            others = sorted(last_parts.difference(linears))
            possible = ", ".join([*linears, *others])
            raise UserError(
                f"--peft.{setting} [{', '.join(absent)}]: not in this model. It has: {possible}."
            )


def _check_excluded(model: nn.Module, peft: PeftConfig) -> None:
    """Check that each part of exclude_modules and layers_to_transform in peft.options has an
    effect. PEFT ignores the others."""
    modules = [name for name, _ in model.named_modules()]
    excluded = peft.options.get("exclude_modules", [])
    absent = []
    if isinstance(excluded, str):
        if not any(re.fullmatch(excluded, name) for name in modules):
            absent = [excluded]
    else:
        dotted = [f".{name}" for name in modules]
        absent = [name for name in excluded if not _ends_one(dotted, name)]
    if absent:
        hint = " A text is a pattern of whole names." if isinstance(excluded, str) else ""
        raise UserError(
            f"--peft.options: exclude_modules {', '.join(absent)}: not in this model.{hint}"
        )
    setting = peft.options.get("layers_to_transform", [])
    numbers = [setting] if isinstance(setting, int) else setting
    layers = len(decoder_layers(model)) if numbers else 0
    if numbers and max(numbers) >= layers:
        raise UserError(
            f"--peft.options: layers_to_transform {max(numbers)}: this model has {layers} decoder layers, from 0."
        )


def _check_patterns(adapter: Adapter, peft: PeftConfig) -> None:
    """Check that each pattern of a rank or an alpha matches a layer with an adapter, as PEFT
    matches it."""
    names = list(adapter.layers)
    for option in ("rank_pattern", "alpha_pattern"):
        patterns: Any = peft.options.get(option, {})
        for pattern in patterns:
            # get_pattern_key returns the pattern that matches, else the name
            if not any(get_pattern_key([pattern], name) == pattern for name in names):
                raise UserError(
                    f'--peft.options: {option} "{pattern}" matches no layer that has an adapter, such as {names[0]}.'
                )


def _ends_one(full_names: list[str], name: str) -> bool:
    """Return whether one of the names, which start with a dot, ends in the whole parts `name`."""
    return any(full_name.endswith(f".{name}") for full_name in full_names)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """In the block, the model computes as without its adapter."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, tuners_utils.BaseTunerLayer)
    ]
    for layer in layers:
        # enable_adapters(False) would also set requires_grad, which shards keep
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapter_scaled(model: nn.Module, factor: float) -> Iterator[None]:
    """In the block, the model computes as with an alpha that is `factor` times as large."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, tuners_utils.BaseTunerLayer)
    ]
    scalings = [layer.scaling for layer in layers if hasattr(layer, "scaling")]
    before = [dict(scaling) for scaling in scalings]
    for scaling in scalings:
        for name in scaling:
            scaling[name] *= factor
    try:
        yield
    finally:
        for scaling, earlier in zip(scalings, before, strict=True):
            scaling.update(earlier)


def first_values(adapter: Adapter, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the first value of each of an adapter's parameters, one layer at a time on
    the CPU. Values are drawn as in PEFT, by a generator of (seed, name), so that they do not depend
    on the mesh. DoRA's magnitudes and the rows of new tokens come from the model's weights. Raises
    UserError for other parameters that PEFT does not initialize: they could never change anything.
    """
    for name, layer in adapter.layers.items():
        methods = [
            getattr(layer, method)
            for method in dir(layer)
            if re.fullmatch(r"reset_\w+_parameters", method)
        ]
        # LoRA's reset function takes one more argument than those of other methods.
        is_lora = isinstance(adapter.config, LoraConfig)
        arguments = [adapter.config.init_lora_weights] if is_lora else []
        meta = dict(layer.named_parameters())
        on_cpu = {
            part: torch.empty_like(parameter, device="cpu") for part, parameter in meta.items()
        }
        layer.load_state_dict(on_cpu, assign=True)
        del on_cpu  # the layer alone holds them, so that its last line here frees them
        for part, value in layer.named_parameters():
            if "_magnitude_vector" in part or "trainable_tokens_delta" in part:
                continue
            version = value._version  # counts what has been written into it
            digest = hashlib.sha256(f"{seed}/{name}.{part}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int.from_bytes(digest[:7]))
                for reset in methods:
                    reset("default", *arguments)
            if value._version == version:
                raise UserError(
                    f"--peft_method: PEFT cannot initialize this adapter on {name}.{part}. Use --peft_method lora."
                )
            yield f"{name}.{part}", value.detach()
        layer.load_state_dict(meta, assign=True)  # frees them
