"""Find what comes with llama_ft in addition to its code: recipes, configs and examples.

In a checkout they are in the repository, where users edit them. A plain install has a copy of them
inside the package (see setup.py).
"""

import re
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PACKAGED = PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parents[1]
CONFIG_FOLDERS = ("configs", "examples")
SHOWN_NAMES = 3
SIMILAR = 0.5  # of difflib
MODEL_NAME = re.compile(r"^ *model_name: *(\S+)", re.MULTILINE)  # in a config


def packaged_configs() -> dict[str, Path]:
    """Return the configs by the names that --config accepts: `quickstart`, `alpaca_lora`."""
    files = [file for folder in CONFIG_FOLDERS for file in (PACKAGED / folder).glob("*.yaml")]
    return {file.stem: file for file in sorted(files)}


def is_file(name: str) -> bool:
    """Return whether a text is the path of a file. The system rejects some texts, such as long ones."""
    try:
        return Path(name).is_file()
    except OSError:
        return False


def find_config(name: str) -> Path:
    """Return the file that --config means: a file of the user, else a packaged config by its name
    or by its path in the repository, else a file that does not exist."""
    file = Path(name)
    if is_file(name):
        return file
    folder = str(file.parent)
    packaged = packaged_configs().get(file.name.removesuffix(".yaml"))
    is_plain_name = folder == "."
    is_its_path = packaged is not None and folder == packaged.parent.name
    return packaged if packaged is not None and (is_plain_name or is_its_path) else file


def find_input(name: str) -> str:
    """Return a path that a packaged config names, such as examples/data/support_tickets.jsonl. If
    the working directory has no such file, it is the packaged one."""
    path, colon, function = name.partition(":")  # examples/orders.py:fields
    packaged = PACKAGED / path
    is_packaged = path.startswith(CONFIG_FOLDERS) and packaged.exists()
    return f"{packaged}{colon}{function}" if is_packaged and not Path(path).exists() else name


def configs_of_model(model: str) -> list[str]:
    """Return the names of the packaged configs that train a model of the Hub."""
    names = list[str]()
    for name, file in packaged_configs().items():
        models = MODEL_NAME.findall(file.read_text(encoding="utf-8"))
        if model.lower() in (other.lower() for other in models):
            names.append(name)
    return names


def nearest_configs(name: str) -> str:
    """Return the packaged configs with similar names, or of a model of this name, as a sentence for
    an error message."""
    names = packaged_configs()
    if of_model := configs_of_model(name):
        return f"Packaged configs of this model: {', '.join(of_model)}."
    word = Path(name).name.removesuffix(".yaml").lower()
    beginnings = [name for name in names if name.startswith(word)]
    similar = beginnings or get_close_matches(word, names, n=SHOWN_NAMES, cutoff=SIMILAR)
    if not similar:
        return "It is neither a file nor the name of a config in configs/ or examples/."
    return f"Packaged configs with similar names: {', '.join(similar)}."
