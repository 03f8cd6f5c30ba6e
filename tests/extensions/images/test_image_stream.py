"""The memory of streamed samples with images."""

import json
from pathlib import Path

import pytest
from conftest import write_jsonl
from forked import forked
from image_models import save_image_model, write_image

JOB = Path(__file__).parent / "image_stream_job.py"
SAMPLES_PER_STEP = 16


@pytest.mark.parametrize("images", [1024, pytest.param(10_000, marks=pytest.mark.large)])
def test_pixels_of_a_stream_are_freed_after_their_step(tmp_path: Path, images: int) -> None:
    model = save_image_model(tmp_path / "model", "Qwen2.5-VL")
    rows = []
    for number in range(images):
        file = write_image(tmp_path / f"{number}.png", 56, 56, number)
        content = [{"type": "image", "image": file.name}, {"type": "text", "text": "What?"}]
        answer = {"role": "assistant", "content": "Noise."}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    data = write_jsonl(tmp_path / "chats.jsonl", rows)
    steps = images // SAMPLES_PER_STEP
    finished = forked(JOB, model, data, steps, tmp_path / "result.json", timeout=1200)
    assert finished.exit_code == 0, finished.output
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["images"] == steps * SAMPLES_PER_STEP
    # In the first half the two windows that are in memory at once, and free lists, reach their size.
    half = found["sizes"][: steps // 2]
    growth = max(found["sizes"]) - max(half)
    pixel_bytes = found["pixel_bytes"] / 2  # of the second half
    assert growth < pixel_bytes / 4, (
        f"{growth / 2**20:.0f} MiB, {pixel_bytes / 2**20:.0f} of pixels"
    )
