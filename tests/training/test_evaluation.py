from pathlib import Path

import pytest
import torch

from llama_ft.config import TrainConfig
from llama_ft.data import BatchLayout
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks
from llama_ft.training import answer_prompts, check_sample_prompts, sample_prompts
from llama_ft.training.train_state import Best, TrainState


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "best", "stops"),
    [
        (2, 0.0, [3.0, 2.0, 2.5, 2.4], (2.0, 2), True),
        (1, 0.1, [2.0, 1.95], (2.0, 1), True),
        (0, 0.0, [1.0] + [2.0] * 50, (1.0, 1), False),
    ],
)
def test_early_stopping_ends_the_run_after_patience_evaluations_without_improvement(
    patience: int, min_delta: float, losses: list[float], best: tuple[float, int], stops: bool
) -> None:
    found = Best(TrainConfig(early_stopping_patience=patience, early_stopping_min_delta=min_delta))
    for step, loss in enumerate(losses, start=1):
        assert found.update({"eval/loss": loss}, step) == (
            loss < min([*losses[: step - 1], float("inf")]) - min_delta
        )
    assert (found.value, found.step) == best and found.should_stop == stops


def test_a_score_is_better_if_it_is_higher_and_a_checkpoint_of_another_metric_is_not_compared() -> (
    None
):
    settings = TrainConfig(best_by="eval/code/score", early_stopping_patience=2)
    state = TrainState(settings)
    scores = [0.0, 0.5, 0.5, 0.25]
    better = [state.best.update({"eval/code/score": score}, n) for n, score in enumerate(scores, 1)]
    assert better == [True, True, False, False]
    assert state.best.should_stop and (state.best.value, state.best.step) == (0.5, 2)
    saved = state.state_dict()
    again = TrainState(settings)
    again.load_state_dict(saved)
    assert vars(again.best) == vars(state.best)
    other = TrainState(TrainConfig())
    other.load_state_dict(saved)
    assert vars(other.best) == vars(TrainState(TrainConfig()).best)
    saved["best"] = {"loss": 2.5, "step": 3, "evaluations_since": 1}  # of version 0.1
    other.load_state_dict(saved)
    assert (other.best.value, other.best.step, other.best.evaluations_since) == (2.5, 3, 1)


LAYOUT = BatchLayout(data_size=1, data_rank=0, micro_batch=1, pad_token_id=2)


def test_without_a_chat_template_sample_prompts_are_continued_as_text(
    tiny_model: Path, runtime: Ranks
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.chat_template is None
    prompts = ["What is a shard?", "Who reads"]
    settings = TrainConfig(sample_tokens=8, sample_prompts=prompts)
    chats = sample_prompts(settings, None)
    found = answer_prompts(BuiltModel(model), tokenizer, chats, 8, LAYOUT, runtime)
    assert [answer["question"] for answer in found] == prompts
    for answer in found:
        ids = tokenizer(answer["question"], return_tensors="pt")["input_ids"]
        expected = model.generate(
            ids, max_new_tokens=8, do_sample=False, pad_token_id=2, attention_mask=ids > -1
        )
        text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer["answer"] == text.strip()
    assert torch.is_grad_enabled()


def test_a_sample_prompt_that_the_model_cannot_answer_is_rejected(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def check(prompts: list[str], vocabulary: int | None) -> None:
        settings = TrainConfig(sample_tokens=8, sample_prompts=prompts)
        check_sample_prompts(sample_prompts(settings, None), tokenizer, vocabulary, None)

    largest = max(tokenizer("Who reads")["input_ids"])
    check(["What", "Who reads"], largest + 1)
    check(["Who reads"], None)
    outside = rf'--sample_prompts "Who reads": token {largest} .* vocabulary of {largest}\.'
    with pytest.raises(UserError, match=outside):
        check(["a", "Who reads"], largest)
    with pytest.raises(UserError, match='--sample_prompts "": it has no tokens'):
        check([""], 301)
    tokenizer.chat_template = "{{ raise_exception('a system message, please') }}"
    rejected = '--sample_prompts "a": the chat template rejects this chat: a system message, please'
    with pytest.raises(UserError, match=rejected):
        check(["a"], 301)


NEEDS_TOOLS = (
    "{% if not tools %}{{ raise_exception('this template needs tools') }}{% endif %}"
    "{{ tools[0].function.name }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_sample_answer_has_the_form_and_the_tools_of_the_training_samples(
    tiny_model: Path, runtime: Ranks
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = NEEDS_TOOLS
    tools = [{"type": "function", "function": {"name": "rank", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "rank", "arguments": {"n": 0}}}
    chat = [
        {"role": "user", "content": "Who reads?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    settings = TrainConfig(sample_tokens=8)
    asked = sample_prompts(settings, chat, tools)
    prompts = TrainConfig(sample_tokens=8, sample_prompts=["Who reads"])
    asked += sample_prompts(prompts, chat, tools, "text")
    check_sample_prompts(asked, tokenizer, None, None)
    found = answer_prompts(BuiltModel(model), tokenizer, asked, 8, LAYOUT, runtime)
    texts = ["rank[user]Who reads?[assistant]", "Who reads"]
    for answer, text in zip(found, texts, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = model.generate(
            ids, max_new_tokens=8, do_sample=False, pad_token_id=2, attention_mask=ids > -1
        )
        written = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer["answer"] == written.strip()
    assert [answer["question"] for answer in found] == ["Who reads?", "Who reads"]
    assert found[0]["reference"] == '{"name": "rank", "arguments": {"n": 0}}'
    assert "reference" not in found[1]
    as_chat = sample_prompts(prompts, chat, tools)
    with pytest.raises(UserError, match="this template needs tools"):
        check_sample_prompts(as_chat, tokenizer, None, None)


def test_answers_end_at_the_last_position_of_the_model(tiny_model: Path, runtime: Ranks) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 301}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=300))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    settings = TrainConfig(sample_tokens=50, sample_prompts=["What"])
    chats = sample_prompts(settings, None)
    [found] = answer_prompts(BuiltModel(model), tokenizer, chats, 50, LAYOUT, runtime)
    ids = tokenizer("What", return_tensors="pt")["input_ids"]
    most = 12 - ids.shape[1]
    model.eval()
    expected = model.generate(
        ids, max_new_tokens=most, do_sample=False, pad_token_id=2, attention_mask=ids > -1
    )
    text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert found["answer"] == text.strip()
