"""The versions of libraries whose private parts are used here: which are allowed, and which of them
were tested. Nothing here imports these libraries."""

from importlib.metadata import PackageNotFoundError, version

# package that is imported -> its name on PyPI
DISTRIBUTIONS = {"liger_kernel": "liger-kernel"}
TITLES = {"transformers": "Transformers", "peft": "PEFT"}
# name on PyPI -> versions that setup.py allows
ALLOWED = {
    "torch": ">=2.11,<2.16",
    "transformers": ">=5.23,<5.26",
    "peft": ">=0.21,<0.22",
    "bitsandbytes": ">=0.50,<0.51",
    "datasets": ">=5.2,<6",
    "safetensors": ">=0.8,<0.9",
    "liger-kernel": ">=0.8,<0.9",
}
# name on PyPI -> oldest and newest minor version with which the tests pass
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.23", "5.24"),
    "peft": ("0.21", "0.21"),
    "bitsandbytes": ("0.50", "0.50"),
}


def title(package: str) -> str:
    """Return how a package is called in a sentence."""
    return TITLES.get(package, _distribution(package))


def installed_version(package: str) -> str:
    """Return the installed version of a package."""
    return version(_distribution(package))


def requirement(package: str) -> str:
    """Return what pip is asked for, such as transformers>=5.23,<5.26."""
    name = _distribution(package)
    return f"{name}{ALLOWED[name]}"


def untested_versions() -> str:
    """Return one line about the installed versions that were not tested; "" if all were."""
    parts = []
    for name, (oldest, newest) in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not _minor(oldest) <= _minor(installed) <= _minor(newest):
            tested = oldest if oldest == newest else f"{oldest} to {newest}"
            parts.append(f"{title(name)} {installed} (tested: {tested})")
    if not parts:
        return ""
    return f"Untested versions: {', '.join(parts)}. A result may be wrong without an error."


def _distribution(package: str) -> str:
    return DISTRIBUTIONS.get(package, package)


def _minor(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    first, second = text.split(".")[:2]
    digits = [int("".join(filter(str.isdigit, part)) or 0) for part in (first, second)]
    return tuple(digits)
