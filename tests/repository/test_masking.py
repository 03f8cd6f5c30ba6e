"""What is a secret and what only looks like one."""

import time

import pytest

from llama_ft.config import differences, load
from llama_ft.errors import UserError
from llama_ft.masking import is_clean, is_url_with_secret, mask_secrets, printable

KEY = "a1B2c3D4e5F6g7H8i9J0"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"HF_TOKEN=hf_{KEY}", "HF_TOKEN=***"),
        ("WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567", "WANDB_API_KEY=***"),
        ("wandb login " + "0123456789abcdef" * 2 + "01234567", "wandb login ***"),
        ("https://me:pass@host.org/rows.jsonl?x=1", "https://***@host.org/rows.jsonl?x=1"),
        ("s3://KEY:SE/CR@ET@bucket/rows.jsonl", "s3://***@bucket/rows.jsonl"),
        ("https://h/r.jsonl?key=short&x=1", "https://h/r.jsonl?key=***&x=1"),
        (
            f"https://b.s3.amazonaws.com/r.jsonl?X-Amz-Credential=AKIA%2F{KEY}&X-Amz-Date=2026&X-Amz-Signature={KEY}",
            "https://b.s3.amazonaws.com/r.jsonl?X-Amz-Credential=***&X-Amz-Date=2026&X-Amz-Signature=***",
        ),
        (
            f"https://x.blob.core.windows.net/c/r?sv=2024&sig={KEY}%3D",
            "https://x.blob.core.windows.net/c/r?sv=2024&sig=***",
        ),
        (f"https://h/r.jsonl?access_token={KEY}", "https://h/r.jsonl?access_token=***"),
        (f"AWS_SECRET_ACCESS_KEY={KEY}/{KEY}", "AWS_SECRET_ACCESS_KEY=***"),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer ***"),
        (f"ghp_{KEY}", "ghp_***"),
        (f"sk-{KEY}", "sk-***"),
        ("AKIA0123456789ABCDEF", "AKIA***"),
        ("password: x", "password: ***"),
        ('{"Password": "x", "a": 1}', '{"Password": "***", "a": 1}'),
        (f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{KEY}_-", "eyJ***"),
        ('{"Authorization": "Basic dXNlcjpwYXNzd29yZA=="}', '{"Authorization": "Basic ***"}'),
        (f"npm_{KEY}{KEY[:16]}", "npm_***"),
        (f"AccountName=a;AccountKey={KEY}+/==", "AccountName=a;AccountKey=***"),
        (f"https://h/f?code={KEY}", "https://h/f?code=***"),
        (f"https://h/r.jsonl?API%5FKEY={KEY}&x=1", "https://h/r.jsonl?API%5FKEY=***&x=1"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nMIIE\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        (f'api_key: "{KEY}"', 'api_key: "***"'),
        (f'{{"apiKey": "{KEY}"}}', '{"apiKey": "***"}'),
        (f"X-Api-Key: {KEY}", "X-Api-Key: ***"),
        (f"upload --hf-token {KEY} --private", "upload --hf-token *** --private"),
        (f"sk_live_{KEY}", "sk_live_***"),
        (f"https://hooks.slack.com/services/T0/B0/{KEY}", "https://hooks.slack.com/services/***"),
        (f"https://discord.com/api/webhooks/12/{KEY}", "https://discord.com/api/webhooks/***"),
        ("http://host/a,http://me:pass@h/b", "http://host/a,http://***@h/b"),
        (
            "environ({'A': 'b', 'DB_PASS': 'x y', 'C': 'd'})",
            "environ({'A': 'b', 'DB_PASS': '***', 'C': 'd'})",
        ),
        ('{"OPENAI_API_KEY": "abcdefgh"}', '{"OPENAI_API_KEY": "***"}'),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked  # facts are masked when written and when shown


@pytest.mark.parametrize(
    "text",
    [
        "recipes/finetuning.py --model_name meta-llama/Llama-3.1-8B --lr 1e-4 --tokenizer_name x --resize_embeddings",
        "https://host.org/a?page=2&sort=key",
        "http://host:8080/org@v1/a.jsonl",
        "hf://datasets/org/name@main/rows.jsonl",
        "s3://bucket/rows.jsonl",
        "~/.cache/huggingface/hub/models--a--b/snapshots/" + "0123456789abcdef" * 2 + "01234567",
        "403,592 tokens",
        "getpass(prompt='Password: ', stream=None)",
        "key=value",
        "--max_new_tokens 100 --pad_token abc",
        "api_key: none",
        "token=None",
        "npm_config_registry_of_mine",
        "Basic understanding of authorization: 3 parts",
        "?code=404",
        "hf_transfer",
        "sk-learn",
        "pad_token=<pad>",
        "user@host: me@example.com",
        '{"pad_token": "PAD_OF_MINE", "image_token": "[IMAGE]"}',
        "{'PWD': '/home/me', 'TOKENIZERS_PARALLELISM': 'false'}",
    ],
)
def test_text_without_secrets_is_not_masked(text: str) -> None:
    assert mask_secrets(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "Ala-Gly-",
        "http://",
        "a+",
        "a",
        "token",
        "?token",
        "&a.token-",
        "x://a:",
        "x://a:b/",
        "sk-",
        "hf_",
        "npm_",
        "eyJa",
        "eyJaaaaaaaa.",
        "eyJaaaaaaaa-",
        "Bearer ",
        "Bearer",
        " ",
        "password ",
        "password: ",
        "Authorization ",
        "Authorization: Basic ",
        "-----BEGIN ",
        "-----BEGIN PRIVATE KEY-----",
        "0123456789abcdef",
        "?a%5F",
        "key=",
        "=",
        "@",
        "://",
        "://a@",
        "'TOKEN",
        "'A_TOKEN': '",
    ],
)
def test_masking_time_is_linear_in_the_length(part: str) -> None:
    text = part * (65_536 // len(part))
    start = time.process_time()
    for function in (mask_secrets, is_url_with_secret):
        function(text)
        function(f"http://{text}")
    assert time.process_time() - start < 2


FORMS = {
    "W&B": "0123456789abcdef" * 2 + "01234567",
    "JWT": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{KEY}",
    "password": f"password={KEY}",
    "PEM": f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----",
    "Hugging Face": f"hf_{KEY}",
}


@pytest.mark.parametrize("secret", FORMS.values(), ids=FORMS)
def test_no_form_of_a_secret_is_repeated_in_errors_and_settings(secret: str) -> None:
    """As a wrong value, in a text that is accepted, and in an error of the user's own function."""
    shown = str(UserError(f"--score s.py:f: ValueError: {secret}"))
    with pytest.raises(UserError) as raised:
        load(["--lr", f" {secret}", "--wandb_notes", secret, f"--{secret}", "1"], paths=False)
    shown += str(raised.value)
    config, _ = load(["--use_wandb", "--wandb_notes", f" {secret}"], paths=False)
    shown += "".join(differences(config))
    assert "***" in shown
    assert KEY not in shown and FORMS["W&B"] not in shown


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATABASE_PWD", "Tr0ub4dor &3")
    monkeypatch.setenv("KEYRING_KEY", "keyring")  # a word
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/google.json")
    said = str(UserError("f: KeyError: connect('db', 'Tr0ub4dor &3') keyring /etc/google.json"))
    assert said == "error: f: KeyError: connect('db', '***') keyring /etc/google.json"


def test_masking_follows_changes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATE_DATABASE_PWD", raising=False)
    assert (
        mask_secrets("connect('old horse 1', 'new horse 2')")
        == "connect('old horse 1', 'new horse 2')"
    )
    monkeypatch.setenv("LATE_DATABASE_PWD", "old horse 1")
    assert mask_secrets("connect('old horse 1', 'new horse 2')") == "connect('***', 'new horse 2')"
    monkeypatch.setenv("LATE_DATABASE_PWD", "new horse 2")
    assert mask_secrets("connect('old horse 1', 'new horse 2')") == "connect('old horse 1', '***')"


def test_characters_that_reorder_a_text_are_replaced() -> None:
    text = "a\u202egnp.exe \u2067b\u2069"
    assert printable(text) == "a\ufffdgnp.exe \ufffdb\ufffd"
    assert not is_clean(text)
    hebrew = "\u05e9\u05dc\u05d5\u05dd\u200f!"
    assert printable(hebrew) == hebrew
