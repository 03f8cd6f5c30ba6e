"""A configuration on its way out: what differs from the defaults, and the YAML that repeats the run."""

import textwrap
from typing import Any

import yaml

from llama_ft.config.fields import SECTIONS, SETTINGS, values_of
from llama_ft.config.sections import Config
from llama_ft.config.wording import show

# They belong to one run and not to what it does: a repetition gets a directory of its own and deletes nothing.
ONE_RUN_ONLY = ("output_dir", "overwrite", "resume", "resume_allow_changes")


def differences(config: Config) -> list[str]:
    """Return one line, `train.lr = 0.002 (default 0.0001)`, for each setting that is not at its default."""
    return [
        f"{SETTINGS[name].dotted} = {show(value)} (default {show(SETTINGS[name].default)})"
        for name, value in values_of(config).items()
        if value != SETTINGS[name].default
    ]


def to_yaml(config: Config, header: str = "") -> str:
    """Write the resolved configuration as a recipe that `--config` reads.

    No secret can be in it: keys and tokens are no settings. output_dir, overwrite and what resumes a run are left out,
    so that reading it again repeats the run in a new directory.

    Args:
        config: the configuration.
        header: text that becomes the comment at the top.
    """
    values = values_of(config)
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, setting in SETTINGS.items():
        if name not in ONE_RUN_ONLY:
            sections[setting.section][name] = values[name]
    comment = textwrap.indent(header.strip(), "# ", lambda line: True)
    body = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)
    return f"{comment}\n\n{body}" if header.strip() else body
