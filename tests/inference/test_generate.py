"""Answers against transformers' generate on the same model, alone; what is drawn against the
probabilities."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answerer, resolve_sampling
from llama_ft.inference.load import LoadedModel, open_model
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks

PROMPTS = [[5, 99, 250, 3, 17], [42], [7, 7, 8, 100, 2, 33, 64, 12, 290], [60, 61]]


class Model:
    """The tiny model, here and in plain transformers."""

    def __init__(self, folder: Path, runtime: Ranks) -> None:
        self.runtime = runtime
        self.opened = open_model(
            str(folder), InferenceFlags(precision="fp32"), runtime, build_model()
        )
        own = self.opened.model.generation_config
        # as a generation_config.json may wish
        own.return_dict_in_generate = True
        own.num_return_sequences = 2
        self.plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = self.opened.tokenizer

    def answerer(self, **flags: Any) -> Answerer:
        return Answerer(
            self.opened,
            InferenceFlags(**{"temperature": 0, "max_new_tokens": 20, **flags}),
            self.runtime,
        )

    def texts(self, prompts: list[list[int]], **flags: Any) -> list[str]:
        return [answer.text for answer in self.answerer(**flags).answer(prompts)]

    def by_transformers(self, prompt: list[int], **settings: Any) -> str:
        tokens = self.plain.generate(
            torch.tensor([prompt]), do_sample=False, pad_token_id=0, **settings
        )
        return str(self.tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def model(tiny_model: Path, runtime: Ranks) -> Model:
    return Model(tiny_model, runtime)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_greedy_answer_equals_transformers_whatever_else_is_in_the_batch(
    penalty: float, model: Model
) -> None:
    how = {"repetition_penalty": penalty}
    expected = [model.by_transformers(prompt, max_new_tokens=20, **how) for prompt in PROMPTS]
    assert len(set(expected)) == 4
    assert model.texts(PROMPTS, **how) == expected
    assert [model.texts([prompt], **how)[0] for prompt in PROMPTS] == expected


def test_sampling_depends_only_on_the_seed_and_the_batch(model: Model) -> None:
    drawn = model.texts([PROMPTS[0]] * 4, temperature=1)
    assert len(set(drawn)) == 4 and drawn == model.texts([PROMPTS[0]] * 4, temperature=1)
    assert drawn != model.texts([PROMPTS[0]] * 4, temperature=1, seed=43)
    likeliest = model.texts([PROMPTS[0]] * 50, temperature=1, top_k=0, top_p=1e-6)
    assert set(likeliest) == {*model.texts([PROMPTS[0]])}


CODE = (
    "def f():\n    if x:\n        return 1\n\n\n    # é 漢字 👩\u200d👧 👍👍\n \ufffd it.\n  end  "
)


class Recites(LlamaForCausalLM):
    """Says given tokens, whatever it is asked."""

    def __init__(self, tokens: list[int], size: int) -> None:
        sizes = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        super().__init__(LlamaConfig(**sizes, vocab_size=size, eos_token_id=None, use_cache=False))
        self.tokens = tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:  # type: ignore[override]
        logits = torch.zeros(1, 1, self.config.vocab_size)
        logits[..., self.tokens[input_ids.shape[1] - 1]] = 1  # the prompt is one token
        return CausalLMOutput(logits=logits)


def like_llama_2() -> PreTrainedTokenizerFast:
    """Words with the space before them, and bytes for all else."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += "▁ ▁▁▁ ▁if ▁return def x : ▁f () ▁1 ▁# ▁it .".split()
    inner = Tokenizer(
        models.Unigram([(piece, -1.0 - len(piece) / 99) for piece in pieces], 0, byte_fallback=True)
    )
    whole = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    inner.decoder = decoders.Sequence(whole)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["BPE", "Llama 2"])
def test_the_streamed_text_equals_the_answer(kind: str, tiny_model: Path, runtime: Ranks) -> None:
    tokenizer: PreTrainedTokenizerBase = (
        AutoTokenizer.from_pretrained(tiny_model) if kind == "BPE" else like_llama_2()
    )
    tokens: list[int] = tokenizer(f"   {CODE}", add_special_tokens=False)["input_ids"]
    recites: Any = Recites(tokens, len(tokenizer)).eval()
    for length in range(3, len(tokens) + 1, 7):
        shown: list[str] = []
        reciter = Answerer(
            LoadedModel(BuiltModel(recites), tokenizer, ""),
            InferenceFlags(max_new_tokens=length),
            runtime,
        )
        [answer] = reciter.answer([[0]], show=shown.append)
        assert "".join(shown) == answer.text or answer.text.endswith("\ufffd")
        assert answer.text == tokenizer.decode(tokens[:length], skip_special_tokens=True)
    assert len(shown) > 12
    assert "\n    if x:\n        return 1\n\n\n    # é 漢字 👩\u200d👧 👍👍\n" in tokenizer.decode(
        tokens
    )


def test_an_answer_can_end_with_a_token_that_is_not_special(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = model.texts([PROMPTS[0]])
    tokens: list[int] = model.tokenizer(whole, add_special_tokens=False)["input_ids"]
    config = copy.deepcopy(model.opened.model.generation_config)
    config.eos_token_id = [next(token for token in tokens[3:] if token not in tokens[:3])]
    monkeypatch.setattr(model.opened.model, "generation_config", config)
    shown: list[str] = []
    [answer] = model.answerer().answer([PROMPTS[0]], show=shown.append)
    assert (
        "".join(shown) == answer.text
        and whole.startswith(answer.text)
        and 0 < len(answer.text) < len(whole)
    )
    assert not answer.is_truncated


def test_the_prompt_and_the_answer_share_the_positions_of_the_model(model: Model) -> None:
    answerer = model.answerer()
    assert [answerer.longest_answer(length) for length in (10, 236, 250)] == [20, 20, 6]
    [answer] = answerer.answer([[9] * 253])
    assert answer.is_truncated
    with pytest.raises(UserError, match="the prompt has 256 tokens"):
        answerer.answer([[9] * 256])


def test_a_prompt_outside_the_vocabulary_is_rejected(model: Model, runtime: Ranks) -> None:
    ids = model.answerer().tokens("Who reads")
    plain = copy.deepcopy(model.plain)
    plain.config.vocab_size = max(ids)
    smaller = Answerer(
        LoadedModel(BuiltModel(plain), model.tokenizer, ""), InferenceFlags(), runtime
    )
    with pytest.raises(UserError, match=rf"the prompt: token {max(ids)} .* of {max(ids)}\."):
        smaller.tokens("Who reads")
    assert smaller.tokens("a")


def test_logits_that_are_not_finite_end_the_generation(model: Model, runtime: Ranks) -> None:
    damaged = copy.deepcopy(model.plain)
    damaged.get_input_embeddings().weight.data[42] = torch.nan  # of one token only
    for temperature in (0, 1):
        options = InferenceFlags(temperature=temperature, max_new_tokens=3)
        with pytest.raises(RunFailure, match="not finite"):
            opened = model.opened._replace(built=BuiltModel(damaged))
            Answerer(opened, options, runtime).answer([[5], [42]])


def test_sampling_settings_default_to_the_generation_config_of_the_model() -> None:
    def resolved(config: GenerationConfig, **flags: Any) -> tuple[Any, ...]:
        return tuple(resolve_sampling(InferenceFlags(**flags), config).values())

    quiet = GenerationConfig()
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    assert (
        resolved(quiet)[0]
        == resolved(own, temperature=0.0)[0]
        == resolved(own, do_sample=False)[0]
        == 0
    )
    assert resolved(quiet, do_sample=True) == resolved(quiet, top_k=50) == (1.0, 1.0, 50, 1.0)
    assert resolved(own) == (0.6, 0.9, 50, 1.0) and resolved(own, temperature=1.2, top_k=0) == (
        1.2,
        0.9,
        0,
        1.0,
    )
