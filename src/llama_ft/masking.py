"""Secrets out of what people pass on: reports and the facts they are made of."""

import re
from urllib.parse import unquote

HIDDEN = "***"
# The name before the = says what the value is, in a URL's query as in a command; a short value is code or an example.
_NAMES = r"(?:api[_-]?key|access[_-]?key|[_-]key|token|secret|passw(?:or)?d|passwd|signature|sig|credential)"
_IN_QUERY = rf"(?:[\w.-]*{_NAMES}[\w.-]*|key|pass|pwd|auth)="
_USER_AND_PASSWORD = r"[^/\s@:?#'\"]*:(?!:|\d+(?:[/?#]|$))[^\s'\"]*@"  # host:8080/a@b is none
_PATTERNS = [
    (re.compile(rf"(\b[a-z][a-z0-9+.-]*://){_USER_AND_PASSWORD}", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(rf"([?&;#]{_IN_QUERY})[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(\b[\w-]*{_NAMES}=['\"]?)[\w+/.~-]{{8,}}=*", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)[\w+/.~-]{8,}=*", re.IGNORECASE), rf"\1{HIDDEN}"),
    # By their form: Hugging Face, GitHub, GitLab, OpenAI and alike, AWS, Google, Slack, W&B.
    (re.compile(r"\b(hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-|AKIA|ASIA|AIza|xox[abps]-|wandb_v\d_)[\w-]{12,}"),
     rf"\1{HIDDEN}"),
    (re.compile(r"(?<![/@\w])[0-9a-f]{40}(?!\w)"), HIDDEN),  # W&B's older keys; in a hub path it is a commit
]  # fmt: skip

# What is a key for certain, for who refuses a text because of one: hiding too much does no harm, refusing does.
_KEY = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bgh[opsu]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[\w-]{30,}|\b(?i:pw|passw(?:or)?d):\s*\S{8,}"
    r"|\b(?:sk-|glpat-|xox[abps]-|api_org_|wandb_v\d_)(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{16,}"
    r"|(?<![/@\w])[0-9a-f]{40}(?!\w)|\bBearer\s+(?=\S*\d)[\w+/.~-]{20,}"
    r"|(?i:passw(?:or)?d|passwd|(?:api|access|secret)[_-]?key|(?:hf|api|auth|access)[_-]token|secret)=['\"]?[\w+/.~-]{8,}"
)
_URL = re.compile(r"\S*://\S+")
_WITH_SECRET = re.compile(
    rf"\bhttps?://[^/\s?#]*@|://{_USER_AND_PASSWORD}|://\S*[?&;#]{_IN_QUERY}[^&\s]", re.IGNORECASE
)
_SECRET_NAME = re.compile(rf"[\w.-]*{_NAMES}", re.IGNORECASE)


def mask_secrets(text: str) -> str:
    """`text` with what looks like a key, a token or a password replaced by ***."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def mask_urls(text: str) -> str:
    """The same for the URLs in `text` only: what else a message holds is needed to understand it."""
    return _URL.sub(lambda url: mask_secrets(url[0]), text)


def is_url_with_secret(text: str) -> bool:
    """Tell a URL with a password, or with a key, a token or a signature in its query."""
    return _WITH_SECRET.search(unquote(text)) is not None


def holds_key(text: str) -> bool:
    """Tell a text with a key or a password in it, by its form; a commit cannot be told from one of W&B's older keys."""
    return _KEY.search(text) is not None


def is_secret_name(name: str) -> bool:
    """Tell a name whose value is a secret: `api_key`, `hf_token`."""
    return _SECRET_NAME.fullmatch(name) is not None
