"""The source archive and the wheel that pip builds, installed into a separate environment."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from forked import REPOSITORY
from model_shapes import write_config
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llama_ft.data import cache_dir
from llama_ft.data.smollm2 import MODULE, build_smollm2

VERBS = ["train", "plan", "chat", "evaluate", "export", "check", "report", "watch", "rollout"]
PACKAGED = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
            "NOTICE", "THIRD_PARTY_NOTICES.md", "requirements.txt", "requirements-dev.txt", "src", "recipes",
            "configs", "examples"]  # fmt: skip


def run(
    *words: object, cwd: Path, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command without this session's PYTHONPATH: only what is installed can be imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(word) for word in words]
    variables = {**inherited, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=300
    )
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def pip(*words: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, cwd=cwd)


def environment(folder: Path, *what: object) -> Path:
    """Return the bin directory of an environment with `what` installed, in addition to this
    interpreter's packages."""
    venv.create(folder, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    (packages / "this_interpreter.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip(
        "--python",
        folder / "bin" / "python",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        *what,
        cwd=folder,
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in PACKAGED:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
        else:
            shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture(scope="module")
def archive(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive."""
    folder = tmp_path_factory.mktemp("archive")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=checkout)
    [file] = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, which so has everything that is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        archive,
        cwd=folder,
    )
    [file] = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin of an environment with the wheel: no checkout is near."""
    return environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def metadata(installed: Path) -> Distribution:
    [folder] = installed.parent.glob("lib/python3.*/site-packages/llama_ft-*.dist-info")
    return Distribution.at(folder)


@pytest.mark.parametrize(
    ("verb", "flag", "exit_code"),
    [
        ("train", "--no_such_flag=1", 2),
        ("train", "--nproc=2 --no_such_flag=1", 2),
        # the others are loaded in the same way
        *(pytest.param(verb, "--help", 0, marks=pytest.mark.slow) for verb in VERBS[2:]),
        *((verb, "--help", 0) for verb in VERBS[:2]),
    ],
)
def test_a_command_answers_without_importing_torch(
    verb: str, flag: str, exit_code: int, tmp_path: Path, installed: Path
) -> None:
    found = run(
        installed / "llama-ft",
        verb,
        *flag.split(),
        cwd=tmp_path,
        check=False,
        PYTHONPROFILEIMPORTTIME="1",
    )
    imports = [line for line in found.stderr.splitlines() if line.startswith("import time:")]
    printed = "\n".join(
        line for line in found.stderr.splitlines() if not line.startswith("import time:")
    )
    assert found.returncode == exit_code, printed
    assert (f"llama-ft {verb}" if flag == "--help" else "no_such_flag") in found.stdout + printed
    assert len(imports) > 100
    assert not [
        line for line in imports if line.rpartition("|")[2].strip() in ("torch", "transformers")
    ]


def test_the_launcher_prints_only_what_the_run_prints(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "llama-ft", "--version", cwd=tmp_path).stdout.startswith("llama_ft ")
    lines = run(installed / "llama-ft", "--help", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == VERBS
    bare = run(installed / "llama-ft", cwd=tmp_path, check=False)
    assert bare.returncode == 2 and bare.stderr.splitlines() == lines
    typo = run(installed / "llama-ft", "trian", cwd=tmp_path, check=False)
    assert typo.returncode == 2 and typo.stderr.endswith(" Did you mean train?\n")
    usage = run(installed / "llama-ft", "train", "--help", cwd=tmp_path).stdout
    assert "\n  llama-ft train --nproc 2 --enable_fsdp [flags]\n" in usage
    for flags, printed in {
        "--no_such_flag=1 --nproc 2": "no_such_flag",
        "--nproc=two": "error: --nproc two: expected the number of",
    }.items():
        found = run(installed / "llama-ft", "train", *flags.split(), cwd=tmp_path, check=False)
        assert found.returncode == 2
        assert len(found.stderr.splitlines()) == 1 and printed in found.stderr


def files_below(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*.*") if file.suffix != ".pyc"}


def test_a_wheel_has_the_recipes_the_configs_and_the_licenses(
    installed: Path, checkout: Path
) -> None:
    [package] = installed.parent.glob("lib/python3.*/site-packages/llama_ft")
    for folder in ("recipes", "configs", "examples"):
        expected = files_below(checkout / folder)
        found = files_below(package / folder)
        assert len(expected) >= len(VERBS)
        assert found == expected
    [licenses] = package.parent.glob("llama_ft-*.dist-info/licenses")
    assert {"LICENSE", "NOTICE", "THIRD_PARTY_NOTICES.md"} <= {
        file.name for file in licenses.iterdir()
    }


@pytest.mark.slow
def test_an_installed_wheel_plans_packaged_configs_by_name_in_any_directory(
    installed: Path, tmp_path: Path
) -> None:
    for name, model_name, table in (
        ("qwen3.5_9b_4bit_24gb", "Qwen/Qwen3.5-9B", "15.3"),
        ("support_tickets", "Qwen/Qwen3-4B-Instruct-2507", "9.5"),
    ):
        model = write_config(tmp_path / name, model_name)
        flags = ["--config", name, "--model_name", model, "--quick"]
        plan = run(installed / "llama-ft", "plan", *flags, cwd=tmp_path).stdout
        [planned] = re.findall(r"A GPU needs ([\d.]+) GiB", plan)
        assert float(planned) == pytest.approx(float(table), abs=0.051)  # of configs/ and examples/
    wrong = run(
        installed / "llama-ft", "plan", "--config", "qwen3_4b_lora", cwd=tmp_path, check=False
    )
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "with similar names: qwen3_4b_lora_24gb." in wrong.stderr


def test_one_variable_gives_the_site_and_the_citation_the_url_of_the_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    generate = importlib.import_module("generate")
    url = "https://example.org/llama_ft"
    for name, key in generate.URL_KEYS.items():
        text = (REPOSITORY / name).read_text()
        filled = generate.with_url(text, key, url)
        assert url not in text and f"\n{key}: {url}\n" in filled
        assert generate.with_url(filled, key, "") == text
    notebook = generate.NOTEBOOK.read_text()
    filled = generate.notebook_with_url(notebook, "https://github.com/owner/llama_ft")
    assert 'REPOSITORY = \\"https://github.com/owner/llama_ft\\"' in filled
    place = "colab.research.google.com/github/owner/llama_ft/blob/main/notebooks/quickstart.ipynb"
    assert place in filled and (REPOSITORY / place.partition("/main/")[2]).is_file()
    assert "colab" not in generate.notebook_with_url(notebook, url)
    assert generate.notebook_with_url(filled, "") == notebook


@pytest.mark.large
def test_an_installed_wheel_trains_the_quickstart_on_two_ranks_in_another_directory(
    installed: Path, tmp_path: Path
) -> None:
    model = build_smollm2(cache_dir()) if find_spec(MODULE) else "demo"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--no-python",
    ]
    few = (
        f"--config quickstart --model_name {model} --device cpu --enable_fsdp --low_cpu_fsdp "
        "--max_train_step 2 --warmup_steps 0 --no_run_validation --sample_tokens 0"
    ).split()
    done = run(
        *torchrun,
        installed / "llama-ft",
        "train",
        *few,
        "--output_dir",
        tmp_path / "run",
        cwd=tmp_path,
    )
    assert "step 2/2  loss" in done.stdout + done.stderr
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    flags = [
        "--config",
        tmp_path / "run" / "config.yaml",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--fit",
        "2GiB",
    ]
    plan = run(installed / "llama-ft", "plan", *flags, "--quick", cwd=tmp_path)
    assert "It fits 2.00 GiB as it is" in plan.stdout


def read_requirements(text: str) -> dict[str, Requirement]:
    found = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def pins() -> dict[str, Requirement]:
    return read_requirements((REPOSITORY / "requirements.txt").read_text())


def pinned(requirement: Requirement) -> str:
    [specifier] = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


@pytest.fixture(scope="module")
def ranges(metadata: Distribution) -> dict[str, Requirement]:
    """What a plain install asks for."""
    return read_requirements(
        "\n".join(line for line in metadata.requires or [] if "extra ==" not in line)
    )


def extra(metadata: Distribution, name: str) -> dict[str, Requirement]:
    lines = [
        line.partition(";")[0] for line in metadata.requires or [] if f'extra == "{name}"' in line
    ]
    return read_requirements("\n".join(lines))


def test_the_tested_versions_lie_within_the_ranges(ranges: dict[str, Requirement]) -> None:
    assert pins().keys() == ranges.keys()
    for name, requirement in pins().items():
        assert ranges[name].specifier.contains(pinned(requirement)), ranges[name]


def test_what_is_imported_is_required(
    metadata: Distribution, ranges: dict[str, Requirement]
) -> None:
    own = {"llama_ft", *(file.stem for file in (REPOSITORY / "recipes").glob("*.py"))}
    own.add("triton")  # torch for CUDA requires it, and nothing else imports it
    extras = metadata.metadata.get_all("Provides-Extra") or []
    optional = {name for each in extras if each != "dev" for name in extra(metadata, each)}
    called = {
        "yaml": "pyyaml",
        "PIL": "pillow",
        "liger_kernel": "liger-kernel",
        "lm_eval": "lm-eval",
        "mlflow": "mlflow-skinny",
    }
    imported: dict[str, Path] = {}
    for file in [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [str(node.module)]
            imported |= {module.partition(".")[0]: file for module in modules}
    missing = {
        name: file
        for name, file in imported.items()
        if name not in own | sys.stdlib_module_names
        and not {canonicalize_name(called.get(name, name))} & {*ranges, *optional}
    }
    assert len(imported) > 30
    assert not missing


def test_the_notices_name_every_requirement(metadata: Distribution) -> None:
    notices = (REPOSITORY / "THIRD_PARTY_NOTICES.md").read_text()
    table = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", notices, re.MULTILINE))
    assert {canonicalize_name(name) for name in table} - {"package"} == pins().keys() and all(
        table.values()
    )
    for name in set(metadata.metadata.get_all("Provides-Extra") or []) - {"dev"}:
        assert f"\n- {name}: " in notices


def test_the_ci_matrix_covers_the_promised_versions(
    metadata: Distribution, ranges: dict[str, Requirement]
) -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    axes = workflow["jobs"]["matrix"]["strategy"]["matrix"]
    classifiers = metadata.metadata.get_all("Classifier") or []
    pythons = [
        found[1]
        for line in classifiers
        if (found := re.fullmatch(r".*:: Python :: (3\.\d+)", line))
    ]
    assert axes["python"] == pythons == ["3.11", "3.12", "3.13"]
    versions = [
        f"2.{minor}" for minor in range(30) if ranges["torch"].specifier.contains(f"2.{minor}.0")
    ]
    assert axes["torch"] == versions == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert metadata.metadata["Requires-Python"] == ">=3.11"
