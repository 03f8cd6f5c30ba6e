"""Small tokenizers whose tokens are easy to read, and the demo, built once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llama_ft.data import Demo, build_demo

# Ġ is a space and Ċ a line break, as byte-level tokenizers write them.
WORDS = "Ġyes Ġno ĊĊ system user assistant Hi yes no ### Instruction Response Input Answer".split()
PIECES = Regex(r"\s*[\r\n]+| ?\S+|\s+")  # line breaks stay together, as in Llama 3's and Qwen's

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes a byte-level BPE tokenizer in which each of WORDS is one token and everything else is
    single bytes."""

    def make(
        special_tokens: list[str], chat_template: str | None, **named_tokens: str
    ) -> PreTrainedTokenizerFast:
        vocabulary = {
            byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        merges = []
        for word in WORDS:
            for end in range(2, len(word) + 1):
                if word[:end] not in vocabulary:
                    vocabulary[word[:end]] = len(vocabulary)
                    merges.append((word[: end - 1], word[end - 1]))
        backend = Tokenizer(models.BPE(vocabulary, merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(PIECES, "isolated"), byte_level]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(special_tokens)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named_tokens)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def llama3(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """As Llama 3: no generation block, no pad token, BOS from the template and from the
    post-processor too."""
    from tokenizers.processors import TemplateProcessing

    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = make_tokenizer(special, LLAMA3_TEMPLATE, bos_token=special[0], eos_token=special[3])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(special[0], tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture
def chatml(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A chat template like Qwen's: a line break after the end of each message, no BOS."""
    return make_tokenizer(["<|im_start|>", "<|im_end|>"], CHATML_TEMPLATE, eos_token="<|im_end|>")


@pytest.fixture
def plain(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A base model's tokenizer: no chat template."""
    return make_tokenizer(["<s>", "</s>"], None, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def demo(cache: Path) -> Demo:
    """The embedded demo, in the cache in which runs look for it, too."""
    return build_demo(cache)
