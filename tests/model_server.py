"""A server that computes with Transformers and answers as one of the servers that people run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from local_server import serve
from transformers import PreTrainedTokenizerBase


def log_probabilities(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Of all tokens after each position, float32 [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


class ModelServer:
    """Answers requests for one model, with the name `tuned`.

    Args:
        model: computes.
        tokenizer: with its chat template.
        dialect: vllm, sglang, llama.cpp or ollama.
        date: a line that its chat template begins with.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, dialect: str = "vllm", date: str = ""
    ) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._date = date
        self.asked = list[str]()  # paths, and the authorization

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, object]:
        self.asked.append(f"{path} {authorization}")
        content = json.loads(body or b"{}")
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}, {"id": "tuned"}]}
        if path == "/v1/completions" and self._dialect != "ollama":
            return self._complete(content)
        if path == "/api/generate" and self._dialect == "ollama":
            ids = self._tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]
            return 200, {"logprobs": [{"top_logprobs": self._top(ids)}]}
        if path == "/v1/chat/completions":
            return 200, self._chat(content)
        return 404, {"error": {"message": "no such path"}}

    def _complete(self, content: dict[str, Any]) -> tuple[int, object]:
        ids = content["prompt"]
        found = log_probabilities(self._model, ids)
        own = found[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        following = self._top(ids)
        if self._dialect == "llama.cpp":
            if content.get("echo"):
                return 400, {"error": {"message": "Only no echo is supported"}}
            return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": following}]}}]}
        if self._dialect == "sglang":
            names = [{entry["token"]: entry["logprob"] for entry in following}]
            if content.get("echo"):
                scores = [None, *own, following[0]["logprob"]]
                both = {"token_logprobs": scores, "top_logprobs": [*[None] * len(ids), *names]}
                return 200, {"choices": [{"logprobs": both}]}
            return 200, {
                "choices": [{"logprobs": {"token_logprobs": [-1.0], "top_logprobs": names}}]
            }
        by_position = [None]
        for token, score in zip(ids[1:], own, strict=True):
            by_position.append({str(token): {"logprob": score, "rank": 1}})
        named = {f"token_id:{entry['id']}": entry["logprob"] for entry in following}
        logprobs = {"token_logprobs": [following[0]["logprob"]], "top_logprobs": [named]}
        return 200, {"choices": [{"prompt_logprobs": by_position, "logprobs": logprobs}]}

    def _top(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        values, tokens = log_probabilities(self._model, ids)[-1].topk(5)
        entries = []
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            entry = {"token": self._tokenizer.decode([token]), "logprob": value, "id": token}
            if self._dialect == "ollama":
                del entry["id"]
            entries.append(entry)
        return entries

    def _chat(self, content: dict[str, Any]) -> dict[str, Any]:
        text = self._tokenizer.apply_chat_template(
            content["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(self._date + text, add_special_tokens=False)["input_ids"]
        answer: dict[str, Any] = {"usage": {"prompt_tokens": len(ids)}}
        if self._dialect == "vllm":
            answer["prompt_token_ids"] = ids
        return answer


@contextmanager
def running(server: ModelServer) -> Iterator[str]:
    """The address of a server."""
    with serve(server.answer) as address:
        yield address
