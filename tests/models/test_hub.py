"""What the hub answers, and what is made of it: huggingface_hub as it is, against a server that
answers as the hub."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import REPOSITORY
from edited_copy import OTHER_TREE
from forked import forked

COMMIT = "0" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"older",
    "optimizer.bin": b"?",
}
REFUSALS = {
    "org/gated": (403, "GatedRepo"),  # the page can be read, the files cannot
    "org/absent": (401, "RepoNotFound"),  # what the hub says to whoever is not logged in
}

ASK = """
import json, sys
from llama_ft.errors import UserError
from llama_ft.models import local_folder

def ask(name):
    try:
        return str(local_folder(name, "--model_name"))
    except UserError as error:
        return str(error)

print(json.dumps({name: ask(name) for name in sys.argv[1:]}))
"""


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's API that a download uses. org/old has no safetensors."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/")
        name = "/".join(path.split("/")[:2])
        is_file = "/resolve/" in path
        files = {
            file: body
            for file, body in FILES.items()
            if name != "org/old" or "safetensors" not in file
        }
        if name in REFUSALS and (name != "org/gated" or is_file):
            status, code = REFUSALS[name]
            self.answer(status, b'{"error": "no"}', {"X-Error-Code": code})
        elif is_file:
            body = FILES[path.rpartition("/")[2]]
            self.answer(200, body, {"ETag": f'"{len(body)}"', "X-Repo-Commit": COMMIT})
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": file, "size": len(files[file]), "oid": COMMIT}
                for file in files
            ]
            self.answer(200, json.dumps(entries).encode(), {})
        else:
            siblings = [{"rfilename": file} for file in files]
            info = {
                "_id": "1",
                "id": name,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
            self.answer(200, json.dumps({**info, "downloads": 0, "likes": 0}).encode(), {})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What comes of each name, and of two names once the hub cannot be reached any more."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    folder = tmp_path_factory.mktemp("hub")
    script = folder / "ask.py"
    script.write_text(ASK)

    def ask(*names: str) -> dict[str, str]:
        finished = forked(
            OTHER_TREE, REPOSITORY, script, *names, HF_HOME=str(folder / "home"), **hub
        )
        assert finished.exit_code == 0, finished.output
        answers: dict[str, str] = json.loads(finished.output.splitlines()[-1])
        return answers

    while_it_answers = ask(*REFUSALS, "my model", "org/fine", "org/old")
    server.shutdown()
    server.server_close()
    return [while_it_answers, ask("org/fine", "org/other")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/gated", "Ask for access at http"),
        ("org/absent", "hf auth login"),
        ("org/old", "the repository has no safetensors weights"),
        ("my model", "owner/model"),
    ],
)
def test_each_http_error_of_the_hub_has_its_message(
    name: str, says: str, outcomes: list[dict[str, str]]
) -> None:
    assert outcomes[0][name].startswith(f"error: --model_name {name}: ")
    assert says in outcomes[0][name]


def test_only_safetensors_are_downloaded_and_found_again_offline(
    outcomes: list[dict[str, str]],
) -> None:
    folder = Path(outcomes[0]["org/fine"])
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert outcomes[1]["org/fine"] == str(folder)
    assert "http://127.0.0.1:" in outcomes[1]["org/other"]
