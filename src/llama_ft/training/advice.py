"""Warnings about settings that are valid but unusual, logged before the first step."""

from llama_ft.config import Config

ADAM = ("AdamW", "anyprecision", "AdamW8bit")
# Published configs use 1e-6 to 2e-5 for full fine-tuning of 1 to 70 B parameters, and 1e-4 to 3e-4
# for LoRA.
FULL_TUNING_LR = 5e-5
LORA_LR = 5e-3
OTHERS_LR = 1e-4  # with AdamW's rates, SGD and Adafactor hardly change a weight


def advice(config: Config, names_dataset: bool, global_batch: int, size: int | None) -> list[str]:
    """Return a warning for each unusual setting, with the usual value.

    Args:
        config: the settings of the run.
        names_dataset: the user chose the dataset; otherwise it is the default.
        global_batch: packed sequences, or samples without packing, per optimizer step.
        size: the same per epoch; None: streamed samples are not counted.
    """
    train = config.train
    given_model = config.model.model_name != "demo"
    hints = []
    if given_model and config.data.dataset == "demo" and not names_dataset:
        hints.append(
            "dataset is demo, questions about Python's standard library. Set --dataset to train on your data."
        )
    if size is not None and size < global_batch:
        unit = "packed sequences" if config.data.batching_strategy == "packing" else "samples"
        hints.append(
            f"the global batch ({global_batch}) is larger than an epoch ({size} {unit}): each epoch is one step. "
            "Lower --gradient_accumulation_steps or --batch_size_training, or use fewer processes."
        )
    if train.optimizer not in ADAM:
        is_usual = train.lr > OTHERS_LR
        usual = "1e-3 or above for SGD and Adafactor"
    elif config.peft.use_peft:
        is_usual = train.lr <= LORA_LR
        usual = "1e-4 to 3e-4 for adapters"
    else:
        is_usual = train.lr <= FULL_TUNING_LR
        usual = "1e-5 to 2e-5 for all weights of a pretrained model"
    if given_model and not is_usual:
        hints.append(f"lr is {train.lr:g}, usual is {usual}. --lr sets it.")
    return hints
