"""Answers against transformers' generate on the same model, alone; what is drawn against the probabilities."""

import copy
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.generate import Answerer, Sampling, settle_sampling
from llama_ft.inference.load import Opened, open_model
from llama_ft.runtime import Runtime

PROMPTS = [[5, 99, 250, 3, 17], [42], [7, 7, 8, 100, 2, 33, 64, 12, 290], [60, 61]]
GREEDY = Sampling(0.0, 1.0, 50, 0.0, 1.0, 20, 42, ())


@pytest.fixture(scope="module")
def opened(tiny_model: Path, runtime: Runtime) -> Opened:
    opened = open_model(
        str(tiny_model), base_model=None, tokenizer_name=None, quantization=None, precision="fp32",
        trust_remote_code=False, enable_fsdp=False, job=runtime,
    )  # fmt: skip
    own = opened.model.generation_config
    own.return_dict_in_generate, own.num_return_sequences = True, 2  # as a generation_config.json may wish
    return opened


@pytest.fixture(scope="module")
def answerer(opened: Opened, runtime: Runtime) -> Answerer:
    return Answerer(opened, runtime, is_sharded=False)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[PreTrainedModel]:
    yield AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def sampled(**changes: Any) -> Sampling:
    return Sampling(**{**vars(GREEDY), "temperature": 1.0, **changes})


def texts(answerer: Answerer, prompts: list[list[int]], rows: list[int], sampling: Sampling) -> list[str]:
    return [answer.text for answer in answerer.answer(prompts, rows, sampling)]


def by_transformers(plain: Any, answerer: Answerer, prompt: list[int], **settings: Any) -> str:
    tokens = plain.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **settings)
    return str(answerer.tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True))


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_greedy_answer_is_transformers_own_whatever_stands_beside_it(
    penalty: float, answerer: Answerer, plain: Any
) -> None:
    sampling = Sampling(**{**vars(GREEDY), "repetition_penalty": penalty})
    expected = [
        by_transformers(plain, answerer, prompt, max_new_tokens=20, repetition_penalty=penalty) for prompt in PROMPTS
    ]
    assert len(set(expected)) == 4
    assert texts(answerer, PROMPTS, [0, 1, 2, 3], sampling) == expected
    assert [texts(answerer, [prompt], [0], sampling)[0] for prompt in PROMPTS] == expected


def test_what_is_drawn_depends_on_seed_and_row_alone(answerer: Answerer) -> None:
    together = texts(answerer, PROMPTS, [0, 1, 2, 3], sampled())
    alone = [texts(answerer, [prompt], [row], sampled())[0] for row, prompt in enumerate(PROMPTS)]
    assert together == alone == texts(answerer, PROMPTS, [0, 1, 2, 3], sampled())
    assert together[3] != texts(answerer, PROMPTS[3:], [4], sampled())[0]
    assert together[3] != texts(answerer, PROMPTS[3:], [3], sampled(seed=43))[0]
    same = texts(answerer, [PROMPTS[0]] * 4, [0, 1, 2, 3], sampled(seed=1))
    assert len(set(same)) == 4, "rows draw for themselves"


def test_tokens_are_drawn_with_their_probabilities(answerer: Answerer, plain: Any) -> None:
    prompt, draws, tokens = PROMPTS[0], 4000, list[str]()
    for first in range(0, draws, 1000):
        rows = list(range(first, first + 1000))
        tokens += texts(answerer, [prompt] * 1000, rows, sampled(temperature=0.5, top_k=6, max_new_tokens=1))
    with torch.no_grad():
        logits, ids = plain(torch.tensor([prompt])).logits[0, -1].topk(6)
    expected: dict[str, float] = {}  # tokens of single bytes look alike
    for id_, probability in zip(ids.tolist(), (logits / 0.5).softmax(0).tolist(), strict=True):
        text = str(answerer.tokenizer.decode([id_], skip_special_tokens=True))
        expected[text] = expected.get(text, 0.0) + probability
    assert len(expected) > 2 and set(tokens) <= expected.keys()
    for text, probability in expected.items():
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(tokens.count(text) / draws - probability) < 4 * deviation
    likeliest = texts(answerer, [prompt] * 50, list(range(50)), sampled(top_k=0, top_p=1e-6, max_new_tokens=1))
    assert set(likeliest) == {answerer.tokenizer.decode([int(ids[0])])}


def test_an_answer_ends_before_a_stop_text_and_what_is_shown_is_the_answer(answerer: Answerer) -> None:
    [whole] = texts(answerer, [PROMPTS[0]], [0], GREEDY)
    word = whole[6:9]
    stopping = Sampling(**{**vars(GREEDY), "stop": (word, "never said")})
    shown: list[str] = []
    [answer] = answerer.answer([PROMPTS[0]], [0], stopping, show=shown.append)
    assert "".join(shown) == answer.text == whole[: whole.index(word)] and not answer.is_cut
    batch = answerer.answer([PROMPTS[1], PROMPTS[0]], [0, 1], stopping)
    assert batch[1] == answer

    shown.clear()
    [answer] = answerer.answer([PROMPTS[0]], [0], GREEDY, show=shown.append)
    assert "".join(shown) == answer.text == whole and answer.is_cut


CODE = "def f():\n    if x:\n        return 1\n\n\n    # é 漢字 👩\u200d👧 👍👍\n \ufffd it 's , I 'm n't .\n  end  "


class Recites(LlamaForCausalLM):
    """Says given tokens, whatever it is asked."""

    def __init__(self, tokens: list[int], size: int) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        super().__init__(LlamaConfig(**sizes, vocab_size=size, eos_token_id=None, use_cache=False))
        self.tokens = tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:  # type: ignore[override]
        logits = torch.zeros(1, 1, self.config.vocab_size)
        logits[..., self.tokens[input_ids.shape[1] - 1]] = 1  # the prompt is one token
        return CausalLMOutput(logits=logits)


def sentencepiece_like(decoder: decoders.Decoder, normalizer: Any = None, pre: Any = None) -> PreTrainedTokenizerFast:
    """Words with the space before them, and bytes for all else."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += "▁ ▁▁▁ ▁if ▁return def x : ▁f () ▁1 ▁# ▁it ▁' s ' ▁, n .".split()
    inner = Tokenizer(models.Unigram([(piece, -1.0 - len(piece) / 99) for piece in pieces], 0, byte_fallback=True))
    inner.decoder = decoder
    inner.normalizer, inner.pre_tokenizer = normalizer, pre
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def tokenizers(tiny_model: Path) -> Iterator[PreTrainedTokenizerBase]:
    yield AutoTokenizer.from_pretrained(tiny_model)  # byte-level BPE
    bytes_ = [decoders.ByteFallback(), decoders.Fuse()]
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama2 = decoders.Sequence([decoders.Replace("▁", " "), *bytes_, decoders.Strip(" ", 1, 0)])
    yield sentencepiece_like(llama2, spaced)
    cleaned = sentencepiece_like(llama2, spaced)
    cleaned.clean_up_tokenization_spaces = True
    yield cleaned
    meta = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), *bytes_])
    yield sentencepiece_like(meta, pre=pre_tokenizers.Metaspace(prepend_scheme="first"))
    yield ByT5Tokenizer()  # in Python alone


@pytest.mark.parametrize("text", [CODE, f"   {CODE}"], ids=["at once", "spaces first"])
@pytest.mark.parametrize("nth", range(5), ids=["BPE", "Llama 2", "cleaned up", "Metaspace", "Python"])
def test_what_is_shown_is_the_answer_to_the_character_wherever_it_ends(
    nth: int, text: str, tiny_model: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = list(tokenizers(tiny_model))[nth]
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = Recites(tokens, len(tokenizer)).eval()
    reciter = Answerer(cast(Any, SimpleNamespace(model=model, tokenizer=tokenizer)), runtime, is_sharded=False)

    def said(length: int, *stop: str) -> tuple[str, list[str]]:
        shown: list[str] = []
        sampling = Sampling(**{**vars(GREEDY), "max_new_tokens": length, "stop": stop})
        [answer] = reciter.answer([[0]], [0], sampling, show=shown.append)
        assert "".join(shown) == answer.text
        return answer.text, shown

    whole, parts = said(len(tokens))
    assert whole == tokenizer.decode(tokens, skip_special_tokens=True) and len(parts) > 12
    assert "\n    if x:\n        return 1\n\n\n    # é 漢字 👩\u200d👧 👍👍\n" in whole
    for length in range(1, len(tokens), 7):  # also amid the bytes of a character
        said(length)
    for word in ("\n        ret", "x:", " it"):
        assert said(len(tokens), word)[0] == whole.partition(word)[0] != whole
    monkeypatch.setattr("llama_ft.inference.generate.EVERY_TOKEN", 20)
    assert len(said(len(tokens))[1]) < len(parts)


def test_a_turn_may_end_with_a_token_that_is_no_special_one(
    answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = texts(answerer, [PROMPTS[0]], [0], GREEDY)
    tokens: list[int] = answerer.tokenizer(whole, add_special_tokens=False)["input_ids"]
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    config = copy.deepcopy(answerer.model.generation_config)
    config.eos_token_id = [end]
    monkeypatch.setattr(answerer.model, "generation_config", config)
    ending = Answerer(
        cast(Any, SimpleNamespace(model=answerer.model, tokenizer=answerer.tokenizer)), answerer._job, False
    )
    shown: list[str] = []
    [answer] = ending.answer([PROMPTS[0]], [0], GREEDY, show=shown.append)
    assert "".join(shown) == answer.text and whole.startswith(answer.text) and 0 < len(answer.text) < len(whole)
    assert not answer.is_cut


def test_an_answer_can_be_stopped_after_any_token(answerer: Answerer) -> None:
    [whole] = texts(answerer, [PROMPTS[0]], [0], GREEDY)
    asked = iter([False, False, True])
    [answer] = answerer.answer([PROMPTS[0]], [0], GREEDY, stopped=lambda: next(asked))
    assert whole.startswith(answer.text) and 0 < len(answer.text) < len(whole) and not answer.is_cut


def test_an_answer_leaves_the_models_positions_for_its_prompt(answerer: Answerer) -> None:
    assert answerer.context == 256
    assert [answerer.longest_answer(length, GREEDY) for length in (10, 236, 250, 256)] == [20, 20, 6, 0]
    [answer] = answerer.answer([[9] * 253], [0], GREEDY)
    assert answer.is_cut


def test_a_model_whose_numbers_are_not_finite_ends_it(opened: Opened, plain: PreTrainedModel, runtime: Runtime) -> None:
    damaged = copy.deepcopy(plain)
    damaged.get_input_embeddings().weight.data[42] = torch.nan  # of one token only
    answerer = Answerer(replace(opened, model=damaged), runtime, is_sharded=False)
    assert texts(answerer, [[5]], [0], GREEDY) == texts(Answerer(opened, runtime, False), [[5]], [0], GREEDY)
    for sampling in (GREEDY, sampled()):
        with pytest.raises(RunFailure, match="not finite"):
            answerer.answer([[5], [42]], [0, 1], sampling)


def asked(**given: Any) -> Namespace:
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "do_sample")
    return Namespace(**{**dict.fromkeys(names), "max_new_tokens": 9, "seed": 1, "stop": [], **given})


def test_what_is_not_asked_for_is_as_the_model_says() -> None:
    quiet, own = GenerationConfig(), GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, min_p=0.05)
    assert settle_sampling(asked(), quiet) == Sampling(0.0, 1.0, 50, 0.0, 1.0, 9, 1, ())
    assert settle_sampling(asked(), own) == Sampling(0.6, 0.9, 50, 0.05, 1.0, 9, 1, ())
    assert settle_sampling(asked(temperature=0.0), own).temperature == 0
    assert settle_sampling(asked(do_sample=True), quiet).temperature == 1
    with pytest.raises(UserError, match="--top_p: nothing is sampled"):
        settle_sampling(asked(top_p=0.5), quiet)
    told = settle_sampling(asked(temperature=1.2, top_k=0, stop=["#"]), own)
    assert (told.temperature, told.top_p, told.top_k, told.stop) == (1.2, 0.9, 0, ("#",))
