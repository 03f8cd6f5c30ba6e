"""Iterates over streamed samples as the training loop does, and writes down what each step had:
folder, cases as JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from llama_ft import data, runtime
from llama_ft.config import Config, DataConfig, TrainConfig
from llama_ft.errors import UserError


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    """Run the cases, one after the other, on the ranks there are."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with runtime.start("cpu", 1, False, None, 60) as ranks:
        for case in cases:
            way = "packing" if case["pack_length"] else "padding"
            config = DataConfig(
                dataset=str(folder / case["file"]),
                streaming=True,
                batching_strategy=way,
                **case["config"],
            )
            settings = TrainConfig(
                max_train_step=case["last"], batch_size_training=case["micro_batch"]
            )
            tokenized = data.prepare(
                config,
                tokenizer,
                data.DataRequest(context_length=200, want_validation=False),
                cache=folder,
            )
            whole = Config(train=settings, data=config)
            layout = data.training_layout(whole, 200, 0, ranks)
            samples = data.plan_training(whole, tokenized, layout, 8, None, ranks)
            steps = []
            message = ""
            try:
                if case.get("first_samples"):
                    samples.first_samples()
                with data.Prefetcher(
                    samples.steps(case["first"], case["last"], case["position"])
                ) as feed:
                    for todo in feed:
                        time.sleep(case.get("pause", 0) * ranks.rank * (todo.step % 3))
                        own = [
                            place.rpartition(":")[2]
                            for batch in todo.batches
                            for place in batch.locations
                        ]
                        everyone = ranks.gather(own)
                        steps.append(
                            {
                                "step": todo.step,
                                "samples": sorted(
                                    int(place) for places in everyone for place in places
                                ),
                                "targets": todo.target_tokens,
                                "micro_batches": len(todo.batches),
                                "ends_epoch": todo.ends_epoch,
                                "epochs_seen": todo.epochs_seen,
                                "position": todo.position,
                            }
                        )
            except UserError as error:
                message = str(error)
            (folder / f"{case['name']}-{ranks.world_size}-{ranks.rank}.json").write_text(
                json.dumps({"steps": steps, "message": message})
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
