"""Iterates over a stream of samples with images as the training loop does, and writes down its memory:
model, data, number of steps, file for the result."""

import json
import re
import sys
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from llama_ft import data, runtime
from llama_ft.config import Config, DataConfig, TrainConfig

SAMPLES = 16  # per step


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024


def main(model: Path, file: Path, steps: int, result: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    media_model = data.MediaModel(model, AutoConfig.from_pretrained(model), tokenizer, False)
    with runtime.start("cpu", 1, False, None, 60) as ranks:
        config = DataConfig(
            dataset=str(file), streaming=True, batching_strategy="padding", shuffle_buffer=256
        )
        request = data.DataRequest(
            context_length=200, want_validation=False, media_model=media_model, no_media=""
        )
        tokenized = data.prepare(config, tokenizer, request, cache=file.parent / "cache")
        whole = Config(
            train=TrainConfig(max_train_step=steps, batch_size_training=SAMPLES), data=config
        )
        layout = data.training_layout(whole, 200, 0, ranks, tokenized.media)
        batches = data.plan_training(whole, tokenized, layout, SAMPLES, None, ranks)
        sizes = []
        images = 0
        pixel_bytes = 0
        with data.Prefetcher(batches.steps(1, steps, {})) as ready:
            for step in ready:
                for batch in step.batches:
                    assert batch.media is not None
                    images += len(batch.media.others["image_grid_thw"])
                    pixel_bytes += batch.media.others["pixel_values"].nbytes
                sizes.append(anonymous_bytes())
    found = {"images": images, "pixel_bytes": pixel_bytes, "sizes": sizes}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
