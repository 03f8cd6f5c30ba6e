"""Runs whose samples are text import nothing of this extension, also if the model takes images."""

import json
from pathlib import Path

from conftest import RECIPE, write_jsonl
from forked import forked
from image_models import save_image_model, write_samples

CODE = """
import sys
from functools import partial
from pathlib import Path
from transformers import AutoConfig, AutoTokenizer
sys.path.insert(0, {recipes!r})
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
    script = tmp_path / "script.py"
    script.write_text(CODE.replace("{recipes!r}", repr(str(RECIPE.parent))))
    finished = forked(script, folder, text, with_images, tmp_path / "cache")
    assert finished.exit_code == 0, finished.output
    of_text, of_images = finished.output.splitlines()[-2:]
    assert of_text == "False 0"
    assert of_images.startswith("True ") and int(of_images.split()[1]) > 5
