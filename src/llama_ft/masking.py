"""Secrets out of what people pass on: reports and the facts they are made of."""

import re

HIDDEN = "***"
# The name before the = says what the value is, in a URL's query as in a command; a short value is code or an example.
_NAMES = r"(?:api[_-]?key|access[_-]?key|[_-]key|token|secret|passw(?:or)?d|passwd|signature|sig|credential)"
_PATTERNS = [
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(rf"([?&;][\w.-]*{_NAMES}[\w.-]*=)[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(\b[\w-]*{_NAMES}=['\"]?)[\w+/.~-]{{8,}}=*", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)[\w+/.~-]{8,}=*", re.IGNORECASE), rf"\1{HIDDEN}"),
    # By their form: Hugging Face, GitHub, GitLab, OpenAI and alike, AWS, Slack, W&B.
    (re.compile(r"\b(hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-|AKIA|ASIA|xox[abps]-|wandb_v\d_)[\w-]{12,}"),
     rf"\1{HIDDEN}"),
    (re.compile(r"(?<![/@\w])[0-9a-f]{40}(?!\w)"), HIDDEN),  # W&B's older keys; in a hub path it is a commit
]  # fmt: skip


def mask_secrets(text: str) -> str:
    """`text` with what looks like a key, a token or a password replaced by ***."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
