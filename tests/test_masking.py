"""What is a secret and what only looks like one."""

import time

import pytest

from llama_ft.masking import is_url_with_secret, mask_keys, mask_secrets

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
    ],
)
def test_masking_time_is_linear_in_the_length(part: str) -> None:
    text = part * (65_536 // len(part))
    start = time.process_time()
    for function in (mask_secrets, mask_keys, is_url_with_secret):
        function(text)
        function(f"http://{text}")
    assert time.process_time() - start < 2
