"""A server that samples from a model of Transformers, as vLLM answers /v1/completions, and that fails
in the ways of servers."""

import json
import time
from typing import Any

import torch
from model_server import log_probabilities


class RolloutServer:
    """Answers requests for the model `tuned`.

    Args:
        model: computes, one token after another, without a cache.
        fault: one of the names in `answer` and `_complete`; "" for none.
    """

    def __init__(self, model: Any, fault: str = "") -> None:
        self._model = model.eval()
        self.fault = fault
        self.requests = list[dict[str, Any]]()

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, object]:
        if path == "/v1/models":
            entry = {"id": "tuned", "root": "/models/tuned", "max_model_len": 256}
            return 200, {"data": [{"id": "base"}, entry]}
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path != "/v1/completions":
            return 404, {"error": {"message": "no such path"}}
        content = json.loads(body)
        self.requests.append({**content, "authorization": authorization})
        if self.fault == "500":
            return 500, {"error": {"message": "the engine has died"}}
        if self.fault == "html":
            return 200, b"<html>gateway</html>"
        if self.fault == "400":
            return 400, {"error": {"message": "max_tokens is too large"}}
        if self.fault == "slow":
            time.sleep(20)
        return 200, self._complete(content)

    def model_of(self, content: dict[str, Any]) -> Any:
        """The model that computes what a request asks for."""
        return self._model

    def _complete(self, content: dict[str, Any]) -> dict[str, Any]:
        model = self.model_of(content)
        generator = torch.Generator().manual_seed(content["seed"])
        ids = list(content["prompt"])
        temperature = content["temperature"]
        tokens = list[int]()
        logprobs = list[float]()
        likely = list[dict[str, float]]()
        reason = "length"
        for _ in range(content["max_tokens"]):
            raw = log_probabilities(model, ids)[-1]
            scaled = (raw / temperature).log_softmax(-1)
            token = int(scaled.exp().multinomial(1, generator=generator))
            told = raw if self.fault == "raw" else scaled
            if self.fault == "shifted":
                told = told - 1
            tokens.append(token)
            ids.append(token)
            logprobs.append(float(told[token]))
            values, names = told.topk(max(1, content["logprobs"]))
            likely.append(dict(zip(map(str, names.tolist()), values.tolist(), strict=True)))
            if token in content.get("stop_token_ids", []):
                reason = "stop"
                break
        choice: dict[str, Any] = {
            "finish_reason": reason,
            "token_ids": tokens,
            "prompt_token_ids": content["prompt"],
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": likely},
        }
        if self.fault == "no ids":
            choice["token_ids"] = None
        if self.fault == "no logprobs":
            choice["logprobs"] = None
        if self.fault == "other prompt":
            choice["prompt_token_ids"] = [1, *content["prompt"]]
        if self.fault == "aborted":
            choice["finish_reason"] = "abort"
        if self.fault == "cut":
            choice |= {"finish_reason": "stop", "token_ids": tokens[:1]}
            choice["logprobs"]["token_logprobs"] = logprobs[:1]
        name = "base" if self.fault == "other model" else content["model"]
        return {"model": name, "choices": [choice]} if self.fault != "no choices" else {}
