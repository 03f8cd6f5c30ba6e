"""GGUF files, read by Transformers' own loader and by the package gguf."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from forked import forked
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llama_ft.data.chat.chat_template import BUILT_IN
from llama_ft.errors import UserError
from llama_ft.extensions.serving.gguf_files.modelfile import translate, write_modelfile
from llama_ft.extensions.serving.gguf_files.vocabulary import SPLITS
from llama_ft.extensions.serving.gguf_files.write import write_model

gguf = pytest.importorskip("gguf", reason="the package gguf is optional")

EXPORT = REPOSITORY / "recipes" / "export.py"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Transformers' loader reads neither head_dim of Qwen 3 nor query_pre_attn_scalar of Gemma 3: they
# have their defaults.
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=128)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **{**SHAPE, "num_hidden_layers": 7}, query_pre_attn_scalar=256, sliding_window=16
        ),
    ),
}


def save_tokenizer(folder: Path, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that splits text as Qwen's does."""
    inner = Tokenizer(models.BPE())
    pattern = next(pattern for pattern, name in SPLITS.items() if name == "qwen2")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=301, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["Who reads the checkpoint?", "Rank 0 reads the weights."], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def sentencepiece(form: str) -> PreTrainedTokenizerFast:
    """A tokenizer of SentencePiece's form: spaces are ▁, and unknown characters bytes."""
    spaces = normalizers.Replace(" ", "▁")
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    learned = Tokenizer(models.BPE())
    learned.normalizer = prepend
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    learned.train_from_iterator(["Who reads the checkpoint?", "Rank 0 reads the weights."], trainer)
    model = json.loads(learned.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    vocabulary = {token: number for number, token in enumerate([*first, *model["vocab"]])}
    merges = [tuple(pair) for pair in model["merges"]]
    inner = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    if form == "llama2":
        inner.normalizer = prepend
    elif form == "gemma":
        inner.normalizer = spaces
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("form", ["llama2", "gemma", "never"])
def test_a_tokenizer_of_sentencepiece_is_read_back_with_the_same_tokens(
    form: str, tmp_path: Path
) -> None:
    tokenizer = sentencepiece(form)
    tokenizer.save_pretrained(tmp_path)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 325})).save_pretrained(tmp_path)
    write_model(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (
        "Who reads 12 weights?",
        "  two  spaces\n\nand\t",
        "é 漢字 🙂",
        "the</s> rank",
        " a",
    ):
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert read(text, add_special_tokens=False)["input_ids"] == expected
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() == (form == "llama2")
    kinds = fields["tokenizer.ggml.token_type"].contents()
    of_bytes = [gguf.TokenType.BYTE] * 256
    named = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    assert kinds[: 3 + 256] == [*named, *of_bytes]
    assert kinds[len(tokenizer) :] == [gguf.TokenType.UNUSED] * (325 - len(tokenizer))


def test_what_llama_cpp_would_split_otherwise_is_refused(tmp_path: Path) -> None:
    """It puts a space before a text that begins with one, and joins characters to any token."""
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 325})).save_pretrained(tmp_path)
    sentencepiece("first").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="splits text"):
        write_model(tmp_path)
    sentencepiece("gemma").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="splits text"):
        write_model(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: settings.update(normalizer={"type": "Lowercase"}),
        lambda settings: settings["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        lambda settings: settings["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
        lambda settings: settings["pre_tokenizer"]["pretokenizers"][1].update(
            add_prefix_space=True
        ),
    ],
)
def test_a_known_regular_expression_alone_is_not_enough(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    change(settings)
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="splits text"):
        write_model(tmp_path)


def save(case: str, folder: Path) -> Any:
    torch.manual_seed(0)
    kind, config = CASES[case]
    model = kind(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_from_the_gguf_file(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    tokenizer = save_tokenizer(tmp_path)
    write_model(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    ids = torch.randint(0, 301, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        assert (again(ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = "Who reads 12 weights, the rank?"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"


def test_the_scaled_frequencies_of_llama3_are_a_tensor(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=LLAMA3)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    write_model(tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    factors = torch.tensor(tensors["rope_freqs.weight"].data)
    plain = 5000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match="sliding_window 16"):
        write_model(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"sliding_window": None}))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": " +"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="splits text"):
        write_model(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_an_adapter_adds_the_same_as_in_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    """As llama.cpp computes it: W + lora_alpha / rank * B A, in its own order of rows."""
    from peft import LoraConfig, get_peft_model

    base = tmp_path / "base"
    model = save("llama", base)
    save_tokenizer(base)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    targets = ["q_proj", "k_proj", "down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=6, target_modules=targets, **settings)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    done = forked(
        EXPORT, tmp_path / "adapter", tmp_path / "out", "--for", "llama.cpp", "--base_model", base
    )
    assert done.exit_code == 0, done.output
    assert f"--lora {tmp_path}/out/adapter.gguf" in done.output
    merged = adapted.merge_and_unload().state_dict()
    reader = gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    parts = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    assert reader.fields["general.type"].contents() == "adapter"
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "ffn_down": "mlp.down_proj",
    }
    assert len(parts) == 2 * 2 * len(names)
    for number in range(2):
        for ours, theirs in names.items():
            right = parts[f"blk.{number}.{ours}.weight.lora_a"]
            left = parts[f"blk.{number}.{ours}.weight.lora_b"]
            added = alpha / left.shape[1] * left @ right
            key = f"model.layers.{number}.{theirs}.weight"
            expected = merged[key] - before[key]
            if ours != "ffn_down":  # rows of neighbors for RoPE, to rows of halves
                added = added.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
            torch.testing.assert_close(added, expected, atol=1e-6, rtol=1e-4)


def test_templates_are_translated_exactly_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, BUILT_IN["chatml"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    write_modelfile(tmp_path, ["FROM ./model.gguf"])
    assert (tmp_path / "Modelfile").read_text() == (
        "FROM ./model.gguf\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ else }}{{ end }}'
        '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "</s>"\nPARAMETER stop "<|im_end|>"\n'
    )
    tokenizer.chat_template = "{{ messages | length }}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be translated for Ollama"):
        write_modelfile(tmp_path, ["FROM ./model.gguf"])


GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ (first if loop.first else '') + m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@pytest.mark.parametrize("template", [BUILT_IN["llama3"], BUILT_IN["alpaca"], GEMMA])
def test_a_translated_template_writes_other_chats_the_same(template: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, template)

    def render(chat: list[dict[str, str]], is_open: bool) -> str:
        return str(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=is_open)
        )

    translated = translate(render)
    assert translated is not None
    system = {"role": "system", "content": "Say: x"}
    turns = [
        ("user", "a b"),
        ("assistant", "c\nd"),
        ("user", "e"),
        ("assistant", "f"),
        ("user", "g"),
    ]
    chat = [{"role": role, "content": content} for role, content in turns]
    for messages in (chat, [system, *chat], chat[:1]):
        assert translated.render(messages) == render(messages, True)


def test_a_run_is_merged_into_one_file_for_ollama(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save("qwen2", base)
    save_tokenizer(base, BUILT_IN["chatml"])
    adapter = tmp_path / "adapter"
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained(str(adapter))
    shutil.copy(base / "tokenizer.json", adapter)
    shutil.copy(base / "tokenizer_config.json", adapter)
    shutil.copy(base / "chat_template.jinja", adapter)
    done = forked(EXPORT, adapter, tmp_path / "out", "--for", "ollama", "--merge")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model.gguf").exists()
    lines = (tmp_path / "out" / "Modelfile").read_text()
    assert lines.startswith("FROM ./model.gguf\nTEMPLATE")
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert "ollama create out" in done.output


def test_a_modelfile_of_a_directory_without_a_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="the stop tokens are those of the tokenizer"):
        write_modelfile(tmp_path, ["FROM base"])
