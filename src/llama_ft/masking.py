"""Make texts safe to print and to pass on: mask secrets, and replace control characters."""

import os
import re
from functools import lru_cache
from urllib.parse import unquote

HIDDEN = "***"
# A secret is found by the name before its =, in the query of a URL or in a command. Short values
# are code or examples. Texts have any length and content (answers of a model, samples), so each
# pattern must take linear time: a part that was scanned from one start must not be scanned again
# from the next one.
_NAMES = (
    r"(?:(?:api|access|account)(?:[_-]|%5F|%2D)?key|(?:[_-]|%5F|%2D)key|token|secret|passw(?:or)?d|signature|sig"
    r"|credential)"
)
# of the names of environment variables; PWD alone is the working directory
_VARIABLE_ENDS = r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|CREDENTIALS?)(?:_ID)?"
_IN_QUERY = rf"[?&;#](?=[\w.%-]*{_NAMES}|(?:key|pass|pwd|auth)=)[\w.%-]+="
# does not match host:8080/a@b
_USER_AND_PASSWORD = r"[^/\s@:?#'\"]*:(?!:|\d+(?:[/?#]|$))(?:(?!://)[^\s'\"])*@"
# Keys with a known form: Hugging Face, GitHub, GitLab, OpenAI and similar, AWS, Google, Slack,
# Stripe, W&B, npm.
_KEY = (
    re.compile(
        r"\b(hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-|[sr]k_live_|AKIA|ASIA|AIza|xox[abps]-|wandb_v\d_"
        r"|npm_(?=[A-Za-z0-9]{30}))[\w-]{12,}"
    ),
    rf"\1{HIDDEN}",
)
_PATTERNS = [
    (re.compile(rf"(://){_USER_AND_PASSWORD}"), rf"\1{HIDDEN}@"),
    (re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"({_IN_QUERY})[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(rf"((?:{_NAMES}|[?&]code)=['\"]?)[\w+/.~-]{{8,}}=*", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"(passw(?:or)?d['\"]?\s*[:=]\s*['\"]?)[^\s'\",;&)][^\s'\"&]*", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"(\bBearer\s+|Authorization\W{1,5}Basic\s+)[\w+/.~-]{8,}=*", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    # api_key: "...", X-Api-Key: ...
    (
        re.compile(
            r"((?:api|access|account)[_-]?key['\"]?\s{0,3}:\s{0,3}['\"]?)[\w+/.~-]{8,}=*",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    # --token ..., --hf-token ...
    (
        re.compile(
            r"(--(?:[a-z]+[_-])*(?:token|api[_-]?key|secret|password)[ \t]+)[\w+/.~-]{8,}=*"
        ),
        rf"\1{HIDDEN}",
    ),
    # web addresses that are a secret as a whole
    (
        re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+"),
        rf"\1{HIDDEN}",
    ),
    _KEY,
    # of a dict such as os.environ; in lower case it may be "pad_token"
    (
        re.compile(
            rf"(['\"][A-Z0-9_]{{0,80}}{_VARIABLE_ENDS}['\"]\s{{0,3}}:\s{{0,3}}['\"])[^'\"]+"
        ),
        rf"\1{HIDDEN}",
    ),
    # JSON web tokens
    (re.compile(r"(?<![\w-])(eyJ)[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3}"), rf"\1{HIDDEN}"),
    (
        re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)"),
        rf"\1{HIDDEN}",
    ),
    # older W&B keys; in a Hub path it is a commit
    (re.compile(r"(?<![/@\w])[0-9a-f]{40}(?!\w)"), HIDDEN),
]

_URL = re.compile(r"(?<!\S)\S*://\S+")
# For settings, where a secret is an error: any user or password, and values of any length.
_USER = re.compile(rf"\bhttps?://[^/\s?#]*@|://{_USER_AND_PASSWORD}", re.IGNORECASE)
_QUERY = re.compile(rf"{_IN_QUERY}[^&\s]", re.IGNORECASE)
# all but tabs and line ends; and what shows the following text in another order (Unicode's
# embeddings, overrides and isolates of bidirectional text)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
# Variables that hold a secret. Their values are masked wherever they appear, unless they look like
# a path, a word or a number.
_SECRET_VARIABLE = re.compile(rf"{_VARIABLE_ENDS}$", re.IGNORECASE)
_PLAIN_VALUE = re.compile(r"[/~.].*|[a-z_-]+|[A-Z_-]+|\d+|.{0,7}", re.DOTALL)


def printable(text: str) -> str:
    """Replace control characters, so that texts of files and models cannot move a terminal's cursor
    or set its title. The length of the text does not change."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def is_clean(name: str) -> bool:
    """Return whether files and terminals can have this name: it has no control characters, and
    comes from UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return _CONTROL.search(name) is None


def mask_secrets(text: str) -> str:
    """Return `text` with everything that looks like a key, a token or a password, and the values of
    environment variables that hold one, replaced by ***."""
    for name in os.environ:
        if _is_secret_variable(name):
            value = os.environ.get(name, "")
            if not _PLAIN_VALUE.fullmatch(value):
                text = text.replace(value, HIDDEN)
    # Most are names and values of settings, which each run writes several times.
    return _mask_forms_again(text) if len(text) <= 100 else _mask_forms(text)


def _mask_forms(text: str) -> str:
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


_mask_forms_again = lru_cache(maxsize=2048)(_mask_forms)


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret. A run asks several hundred
    times for each of its variables, and the search takes 10 us."""
    return _SECRET_VARIABLE.search(name) is not None


def is_url_with_secret(text: str) -> bool:
    """Return whether a text is a URL with a password, or with a key, a token or a signature in its
    query."""
    for url in _URL.findall(unquote(text)):
        if _USER.search(url) or _QUERY.search(url):
            return True
    return False
