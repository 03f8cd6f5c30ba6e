"""`check --server` tells whether a server applies an adapter, with servers of each dialect that
compute with Transformers, and with servers that misbehave."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases, write_rows
from model_server import ModelServer, running
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ft.errors import UserError
from llama_ft.extensions.serving.probes.check import ServerFlags, check_server

Saved = tuple[Path, Path]  # directories of the base model and of the run


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run with an adapter. Next to it are one of a whole model and one on an 8-bit base model."""
    folder = tmp_path_factory.mktemp("served")
    rows = write_rows(folder / "rows.jsonl", 24)
    settings = "--context_length 64 --max_train_step 5 --lr 2e-2 --precision fp32"
    common = f"--model_name {tiny_model} --dataset {rows} {settings}"
    lora = f"{common} --use_peft --peft.r 8 --output_dir {folder / 'lora'}"
    full = f"{common} --output_dir {folder / 'full'}"
    qlora = f"{common} --use_peft --peft.r 8 --quantization 8bit --output_dir {folder / 'qlora'}"
    run_cases(folder, [lora.split(), full.split(), qlora.split()])
    return tiny_model, folder / "lora"


def served(saved: Saved, change: Callable[[Any], None] | None = None, **more: Any) -> ModelServer:
    """A server of the adapter, whose weights `change` may change."""
    base, run = saved
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(model, run / "model")
    if change is not None:
        with torch.no_grad():
            change(tuned)
    return ModelServer(tuned, AutoTokenizer.from_pretrained(run / "model"), **more)


def checked(
    server: ModelServer, run: Path, capsys: pytest.CaptureFixture[str], **flags: Any
) -> tuple[int, str]:
    """The exit code and what is printed."""
    with running(server) as address:
        return asked(address, run, capsys, **flags)


def asked(
    address: str, run: Path, capsys: pytest.CaptureFixture[str], model: str = "tuned", **flags: Any
) -> tuple[int, str]:
    try:
        check_server(ServerFlags(paths=[str(run)], server=address, model=model, **flags))
    except SystemExit as ended:
        return int(str(ended.code)), capsys.readouterr().out
    except UserError as error:
        return 2, str(error)
    return 0, capsys.readouterr().out


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp", "ollama"])
def test_an_adapter_that_is_applied_is_recognized_on_each_server(
    saved: Saved, capsys: pytest.CaptureFixture[str], dialect: str
) -> None:
    code, text = checked(served(saved, dialect=dialect), saved[1], capsys)
    assert code == 0, text
    assert "the adapter is applied (largest difference" in text
    assert "chat template: as in the fine-tuning (" in text


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp", "ollama"])
def test_a_server_of_the_base_model_is_not_taken_for_the_adapter(
    saved: Saved, capsys: pytest.CaptureFixture[str], dialect: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(saved[1] / "model")
    code, text = checked(ModelServer(base, tokenizer, dialect), saved[1], capsys)
    assert code == 3
    assert "the server answers as the base model: the adapter is NOT applied" in text


def of_layers(tuned: Any) -> list[Any]:
    return [module for module in tuned.modules() if hasattr(module, "lora_A")]


def double_alpha(tuned: Any) -> None:
    for layer in of_layers(tuned):
        layer.scaling["default"] *= 2


def halve_alpha(tuned: Any) -> None:
    for layer in of_layers(tuned):
        layer.scaling["default"] /= 2


def lower_alpha(tuned: Any) -> None:
    """14 for 16."""
    for layer in of_layers(tuned):
        layer.scaling["default"] *= 14 / 16


def raise_alpha(tuned: Any) -> None:
    """18 for 16."""
    for layer in of_layers(tuned):
        layer.scaling["default"] *= 18 / 16


def cut_rank(tuned: Any) -> None:
    for layer in of_layers(tuned):
        layer.lora_B["default"].weight[:, 6:] = 0


def lose_a_layer(tuned: Any) -> None:
    """As if a server did not know the names of one of two layers."""
    for layer in of_layers(tuned.base_model.model.model.layers[1]):
        layer.lora_B["default"].weight.zero_()


def lose_all(tuned: Any) -> None:
    """As if a server knew none of the names."""
    for layer in of_layers(tuned):
        layer.lora_B["default"].weight.zero_()


def replace_base(tuned: Any) -> None:
    for layer in of_layers(tuned):
        weight = layer.base_layer.weight
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=torch.manual_seed(0))


@pytest.mark.parametrize(
    "change",
    [double_alpha, halve_alpha, lower_alpha, raise_alpha, cut_rank, lose_a_layer, replace_base],
)
def test_a_broken_adapter_is_neither_applied_nor_the_base_model(
    saved: Saved, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    code, text = checked(served(saved, change), saved[1], capsys)
    assert code == 3
    assert "neither the fine-tuned nor the base model: other weights, template or dtype" in text


@pytest.mark.parametrize("dialect", ["sglang", "llama.cpp", "ollama"])
def test_an_eighth_less_of_alpha_is_told_on_each_server(
    saved: Saved, capsys: pytest.CaptureFixture[str], dialect: str
) -> None:
    code, text = checked(served(saved, lower_alpha, dialect=dialect), saved[1], capsys)
    assert code == 3
    assert "from base to fine-tuned model the server is at" in text


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        (None, 0, "the adapter is applied"),
        (halve_alpha, 3, "neither the fine-tuned nor the base model"),
        (cut_rank, 3, "neither the fine-tuned nor the base model"),
        (lose_a_layer, 3, "neither the fine-tuned nor the base model"),
        (lose_all, 3, "the server answers as the base model: the adapter is NOT applied"),
    ],
)
def test_after_qlora_a_server_of_the_unquantized_base_model_is_told_apart_from_broken_ones(
    saved: Saved,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], None] | None,
    code: int,
    expected: str,
) -> None:
    base, run = saved
    qlora = (base, run.parent / "qlora")
    found, text = checked(served(qlora, change), qlora[1], capsys)
    assert (found, expected in text) == (code, True), text


def test_another_base_model_is_not_taken_for_another_alpha(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = checked(served(saved, replace_base), saved[1], capsys)
    assert "look for another base model, quantization or dtype" in text
    assert "an alpha" not in text


def test_another_chat_template_is_found(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    for dialect, expected in [
        ("vllm", "token 1 of a chat differs"),
        ("sglang", "tokens of a chat"),
    ]:
        server = served(saved, dialect=dialect, date="Today: ")
        code, text = checked(server, saved[1], capsys)
        assert code == 3
        assert "the adapter is applied" in text
        assert expected in text and "--chat-template" in text


def test_a_whole_model_is_as_trained_or_another(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = saved
    full = run.parent / "full"
    tokenizer = AutoTokenizer.from_pretrained(full / "model")
    for folder, code, expected in [
        (full / "model", 0, "the weights are as trained (largest difference"),
        (base, 3, "not the fine-tuned model: other weights, template or dtype"),
    ]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        found, text = checked(ModelServer(model, tokenizer), full, capsys)
        assert (found, expected in text) == (code, True), text


def test_the_key_is_sent_and_never_printed(
    saved: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "my-own-key-42")
    server = served(saved)
    code, text = checked(server, saved[1], capsys)
    assert code == 0 and "my-own-key-42" not in text
    assert all(request.endswith(" Bearer my-own-key-42") for request in server.asked)


def test_without_a_name_the_models_of_the_server_are_listed(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", None):
        code, text = checked(served(saved), saved[1], capsys, model=name)
        assert code == 2 and "It has: base, tuned." in text


class Misbehaving(http.server.BaseHTTPRequestHandler):
    """Answers as `behavior` says."""

    behavior = ""

    def do_POST(self) -> None:
        if self.behavior == "slow":
            time.sleep(3)
        if self.behavior == "drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(30):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
            return
        if self.behavior == "dies" and self.path != "/v1/models":
            self.connection.close()
            return
        status, text = self.reply()
        self.send_response(status)
        if self.behavior == "redirect":
            self.send_header("Location", "http://other.example/v1/models")
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def reply(self) -> tuple[int, str]:
        key = self.headers.get("Authorization", "")
        simple = {
            "html": (200, "<html><body>Welcome</body></html>"),
            "500": (500, json.dumps({"error": {"message": f"worker died ({key})"}})),
            "401": (401, "{}"),
            "redirect": (302, ""),
            "truncated": (200, '{"data": [{"id"'),
            "list": (200, "[]"),
            "another model": (200, '{"data": [{"id": "other"}]}'),
            "many models": (200, json.dumps({"data": [{"id": f"m{n}"} for n in range(1000)]})),
        }
        if self.behavior in simple:
            return simple[self.behavior]
        if self.path == "/v1/models":
            return 200, '{"data": [{"id": "tuned"}]}'
        if self.behavior.endswith(" later"):
            return simple[self.behavior.removesuffix(" later")]
        if self.behavior == "another tokenizer":
            return 400, '{"error": {"message": "Token id 300 is out of vocabulary"}}'
        if self.behavior == "odd numbers":
            return 200, '{"choices": [{"prompt_logprobs": [null, {"5": {"logprob": "NaN"}}]}]}'
        if self.behavior in ("huge numbers", "few numbers"):
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            scores = [{str(token): {"logprob": 10**400}} for token in ids[1:]]
            if self.behavior == "few numbers":
                scores[0] = {str(ids[1]): {"logprob": -1.0}}
            return 200, json.dumps({"choices": [{"prompt_logprobs": [None, *scores]}]})
        return 200, '{"choices": [{"text": "Hello", "logprobs": null}]}'  # "no log-probabilities"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def misbehaving(behavior: str) -> Iterator[str]:
    handler = type("Handler", (Misbehaving,), {"behavior": behavior})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client has left
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("behavior", "expected"),
    [
        ("html", "answers with HTML, not with JSON"),
        ("500", "fails with HTTP 500 (worker died"),
        ("401", "HTTP 401. OPENAI_API_KEY has another key"),
        ("redirect", "redirects to http://other.example/v1/models. Give that URL."),
        ("truncated", "not with JSON"),
        ("list", "not with JSON"),
        (
            "another model",
            "--model tuned: http://127.0.0.1:{port} has no such model. It has: other.",
        ),
        ("another tokenizer", "gives no log-probabilities for the tokens of a prompt, by which a"),
        ("another tokenizer", "It says: Token id 300 is out of vocabulary."),
        ("no log-probabilities", "gives no log-probabilities for the tokens of a prompt"),
        ("odd numbers", "gives no log-probabilities for the tokens of a prompt"),
        ("huge numbers", "no log-probability of the server can be compared"),
        ("few numbers", "values of the server are log-probabilities"),
        ("many models", "no such model. It has: m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11,"),
        ("many models", "m19, ... and 980 more."),
        (
            "500 later",
            "/v1/completions fails with HTTP 500 (worker died (Bearer ***)). The server's own log has",
        ),
        ("html later", "/v1/completions answers with HTML, not with JSON"),
        ("401 later", "HTTP 401. OPENAI_API_KEY has another key"),
        ("dies", "has stopped answering ("),
        ("slow", "does not answer within 1 s. --server_timeout allows more."),
        ("drip", "does not answer within 1 s. --server_timeout allows more."),
    ],
)
def test_a_server_that_misbehaves_is_one_error(
    saved: Saved,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    expected: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "my-own-key-42")
    with misbehaving(behavior) as address:
        code, text = asked(address, saved[1], capsys, server_timeout="1s")
        assert code == 2
        assert expected.format(port=address.rpartition(":")[2]) in text
        assert len(text.splitlines()) == 1 and "my-own-key-42" not in text


def test_a_server_that_is_not_there_is_an_error(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    with misbehaving("html") as address:
        pass  # the port is free again
    code, text = asked(address, saved[1], capsys)
    assert code == 2
    assert (
        text
        == f"error: --server {address}: cannot be asked (the host does not answer (connection refused))."
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"paths": []}, "RUN is needed"),
        ({"paths": ["a", "b"]}, "RUN is needed"),
        ({"paths": ["missing-run"]}, "there is no run or model here."),
        ({"server": "localhost:8000"}, "expected a URL such as http://localhost:8000"),
        ({"server": "http://[::1"}, "expected a URL such as http://localhost:8000"),
        ({"server": "http://localhost:none"}, "expected a URL such as http://localhost:8000"),
        ({"server": "http://me:secret@host"}, "--server"),
        ({"server": None}, "only for --server"),
    ],
)
def test_wrong_flags_are_user_errors(flags: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    good = {"paths": [str(tmp_path / "empty")], "server": "http://127.0.0.1:9", "model": "tuned"}
    with pytest.raises(UserError) as caught:
        check_server(ServerFlags(**{**good, **flags}))
    assert expected in str(caught.value) and "secret" not in str(caught.value)


def test_a_run_without_probes_is_an_error(tmp_path: Path) -> None:
    prompt = {"token_ids": [1, 2, 3], "text": None, "next_ids": [], "next_texts": []}
    scores = {"scores": {"fine_tuned": [-1.0]}, "next_scores": {"fine_tuned": []}}
    probes = {"is_adapter": True, "dtype": "float32", "quantization": None}
    short = {"version": 2, **probes, "probes": [{**prompt, **scores}]}
    odd = {"version": 2, **probes, "probes": [{**prompt, **scores, "token_ids": "abc"}]}
    for content, expected in [
        (None, "has no model/probes.json"),
        ("{", "cannot be read"),
        ("[]", r"cannot be read \(its content is not that of probes\)"),
        ('{"version": 3}', "a newer version of llama_ft has written it"),
        (json.dumps(short), "log-probabilities are missing"),
        (json.dumps(odd), "probes.0.token_ids has another form"),
    ]:
        (tmp_path / "model").mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / "model" / "probes.json").write_text(content)
        with pytest.raises(UserError, match=expected):
            check_server(ServerFlags(paths=[str(tmp_path)], server="http://127.0.0.1:9"))
