"""The workflows of .github: what they may do, and their shell scripts, which are run here."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from pages import flag_errors, read_commands

from llama_ft import __version__

FOLDER = REPOSITORY / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
NAMES = [file.stem for file in WORKFLOWS]
# A commit with its tag.
PINNED = re.compile(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def read_workflow(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    return workflow


def steps_of(name: str) -> list[dict[str, Any]]:
    jobs = read_workflow(name)["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def script_of(name: str, step_name: str) -> str:
    [step] = [step for step in steps_of(name) if step.get("name") == step_name]
    assert step["shell"] == "bash"
    script: str = step["run"]
    return script


def run_script(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as GitHub does for `shell: bash`."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_may_only_read_unless_a_job_says_more(name: str) -> None:
    workflow = read_workflow(name)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_pinned_to_a_commit(name: str) -> None:
    text = (FOLDER / f"{name}.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert not [action for action in used if not PINNED.fullmatch(action)]


@pytest.mark.parametrize("name", NAMES)
def test_no_checkout_leaves_its_token_behind(name: str) -> None:
    checkouts = [step for step in steps_of(name) if "actions/checkout@" in step.get("uses", "")]
    assert checkouts
    for step in checkouts:
        assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_has_no_secret_but_its_own_token(name: str) -> None:
    text = (FOLDER / f"{name}.yml").read_text()
    assert "secrets." not in text
    assert "password" not in re.sub(r"#.*", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_shellcheck_finds_nothing_in_the_steps(name: str, tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for number, step in enumerate(steps_of(name)):
        # GitHub puts the values in before the shell starts.
        text = re.sub(r"\$\{\{.*?\}\}", "value", step.get("run", ":"))
        file = tmp_path / f"{number}.sh"
        file.write_text(f"#!/bin/bash\n{text}\n")
        done = subprocess.run([shellcheck, file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("tag", "section", "error"),
    [
        ("v1.2.3", "1.2.3", ""),
        ("v1.2.4", "1.2.3", "the tag is v1.2.4, and src/llama_ft/__init__.py has 1.2.3"),
        ("v1.2.3", "Unreleased", "CHANGELOG.md has no section [1.2.3]"),
    ],
)
def test_a_release_needs_the_version_of_its_tag(
    tag: str, section: str, error: str, tmp_path: Path
) -> None:
    package = tmp_path / "src" / "llama_ft"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""About."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{section}] - 2026-11-23\n")
    script = script_of("release", "Compare the tag with the version")
    done = run_script(script, tmp_path, GITHUB_REF_NAME=tag)
    assert done.returncode == bool(error)
    assert error in done.stderr


def test_pypi_gets_the_package_alone_and_the_release_everything() -> None:
    script = script_of("release", "Write the lock file and the SBOM")
    written = re.findall(r"--output-file (\S+)", script)
    assert written == ["release/requirements.lock", "release/sbom.cdx.json"]
    jobs = read_workflow("release")["jobs"]
    downloads = {}
    for job in ("pypi", "github"):
        [downloads[job]] = [
            step["with"]
            for step in jobs[job]["steps"]
            if "actions/download-artifact@" in step.get("uses", "")
        ]
    assert downloads["pypi"] == {"name": "dist", "path": "dist/"}
    assert downloads["github"] == {"path": "."}  # a folder per artifact


@pytest.mark.parametrize("open_issue", ["", "7"])
def test_one_issue_is_opened_for_the_newest_versions(open_issue: str, tmp_path: Path) -> None:
    # In place of GitHub's command: it notes how it was called, and answers `gh issue list`.
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/sh\necho "$*" >> calls\n[ "$2" = create ] || echo {open_issue}\n')
    gh.chmod(0o755)
    (tmp_path / "versions.txt").write_text("torch==2.99.0\n")
    (tmp_path / "pytest.txt").write_text("FAILED tests/test_x.py::test_y\n")
    script = script_of("newest", "Open an issue")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_script(script, tmp_path, PATH=path, RUN_URL="https://example.org/1")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert ("issue create" in calls) == (open_issue == "")
    if not open_issue:
        text = (tmp_path / "issue.md").read_text()
        for part in ("https://example.org/1", "torch==2.99.0", "FAILED tests/test_x.py"):
            assert part in text


def test_the_newest_versions_are_installed_after_the_others() -> None:
    commands = [step["run"] for step in steps_of("newest") if "run" in step]
    installs = [command for command in commands if command.startswith("uv pip install")]
    _, upgrade = installs
    for name in ("torch", "transformers", "peft", "datasets"):
        assert f" {name}" in upgrade
    assert "--upgrade" in upgrade


def test_the_image_is_asked_for_commands_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker is not needed here: each command's own flags are read."""
    monkeypatch.chdir(REPOSITORY)
    steps = read_workflow("ci")["jobs"]["image"]["steps"]
    lines = [step["run"] for step in steps if step.get("run", "").startswith("docker run")]
    inside = [line.partition(" llama-ft ")[2] for line in lines]
    assert [line.split()[1] for line in inside] == ["--version", "plan", "train"]
    for line in inside:
        [command] = read_commands(line)
        assert command.text == line and not flag_errors(command)


def test_a_released_image_has_the_version_of_its_tag(tmp_path: Path) -> None:
    docker = tmp_path / "docker"  # in place of Docker: it notes how it was called
    docker.write_text(
        '#!/bin/sh\necho "$*" >> calls\n[ "$1" = run ] && echo "llama_ft 0.2.0"\nexit 0\n'
    )
    docker.chmod(0o755)
    script = script_of("release", "Build and push the image")
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "GITHUB_REPOSITORY": "Owner/llama_ft",
        "GITHUB_ACTOR": "me",
        "GH_TOKEN": "token",
    }
    done = run_script(script, tmp_path, GITHUB_REF_NAME="v0.2.0", **variables)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    image = "ghcr.io/owner/llama_ft"
    assert calls[0] == f"build -t {image}:0.2.0 -t {image}:latest ."
    assert calls[2:] == [f"push {image}:0.2.0", f"push {image}:latest"]
    login = json.loads((tmp_path / ".docker" / "config.json").read_text())
    assert base64.b64decode(login["auths"]["ghcr.io"]["auth"]) == b"me:token"
    (tmp_path / "calls").unlink()
    done = run_script(script, tmp_path, GITHUB_REF_NAME="v0.3.0", **variables)
    assert done.returncode != 0 and "push" not in (tmp_path / "calls").read_text()


def test_the_changelog_has_this_version_with_five_highlights() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = text.partition(f"\n## [{__version__}] - ")[2].partition("\n## ")[0]
    highlights = newest.partition("### Highlights\n\n")[2].partition("\n\n")[0]
    dates = re.findall(r"^- (\d{4}-\d\d-\d\d): ", highlights, re.MULTILINE)
    assert len(dates) == highlights.count("\n- ") + 1 == 5
    themes = re.findall(r"^### (.*)$", newest, re.MULTILINE)[1:]
    assert len(themes) >= 5 and not {"Added", "Changed", "Fixed"} & {*themes}
    assert f"version: {__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
    assert f"version {__version__}," in (REPOSITORY / "docs" / "index.md").read_text()
