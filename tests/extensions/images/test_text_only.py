"""Runs whose samples are text import nothing of this extension, also if the model takes images."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY, write_jsonl
from image_models import save_image_model, write_samples

CODE = """
import sys
from functools import partial
from pathlib import Path
from transformers import AutoConfig, AutoTokenizer
import finetuning  # the recipe, with all that it imports
from llama_ft.config import DataConfig
from llama_ft.data import DataRequest, MediaModel, prepare

folder, *files, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = MediaModel(Path(folder), AutoConfig.from_pretrained(folder), tokenizer, False)
request = DataRequest(context_length=256, want_validation=False, media_model=model)
for file in files:
    data = prepare(DataConfig(dataset=file), tokenizer, request, Path(cache))
    loaded = {name for name in sys.modules if name.startswith("llama_ft.extensions.images.")}
    loaded -= {"llama_ft.extensions.images.extension"}
    print(data.media is not None, len(loaded))
"""


def test_the_extension_is_imported_by_the_first_sample_with_an_image(tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    with_images = write_samples(tmp_path / "images")
    rows = [json.loads(line) for line in with_images.read_text().splitlines()]
    text = write_jsonl(tmp_path / "text.jsonl", [rows[1], rows[3]])
    arguments = [str(path) for path in (folder, text, with_images, tmp_path / "cache")]
    command = [sys.executable, "-c", CODE, *arguments]
    environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'recipes'}"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr
    of_text, of_images = said.stdout.splitlines()
    assert of_text == "False 0"
    assert of_images.startswith("True ") and int(of_images.split()[1]) > 5
