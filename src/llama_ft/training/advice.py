"""What someone who has tuned many models would ask about the settings before the first step."""

from llama_ft.config import Config

ADAM = ("AdamW", "anyprecision", "AdamW8bit")
# Published recipes take 1e-6 to 2e-5 for whole models of 1 to 70 B parameters, and 1e-4 to 3e-4 for LoRA.
FULL_TUNING_LR, LORA_LR = 5e-5, 5e-3
OTHERS_LR = 1e-4  # with which SGD and Adafactor, whose rates are of other scales, hardly move a weight
WARMUP_SHARE = 5


def advice(config: Config, total_steps: int, global_batch: int, size: int | None) -> list[str]:
    """Settings that can be meant, but mostly are not, each with what would be usual.

    Args:
        config: the run's.
        total_steps: optimizer steps of the whole run.
        global_batch: packs (or rows) of an optimizer step over all ranks.
        size: packs (or rows) of an epoch; None: a stream, whose rows are not counted.
    """
    train, given_model = config.train, config.model.model_name != "demo"
    found = []
    if given_model and config.data.dataset == "demo":
        found.append(
            "dataset is demo: questions about Python's standard library, to try things out. --dataset names yours."
        )
    if size is not None and size < global_batch:
        unit = "pack" if config.data.batching_strategy == "packing" else "row"
        found.append(
            f"an epoch has {size} {unit}{'s' if size > 1 else ''}, and an optimizer step takes {global_batch}: each "
            "epoch is one step. --gradient_accumulation_steps, --batch_size_training and fewer processes make it less."
        )
    if total_steps < train.max_train_step:
        passes = "1 epoch ends" if train.num_epochs == 1 else f"{train.num_epochs} epochs end"
        found.append(f"max_train_step is {train.max_train_step}, but {passes} after {total_steps}: --num_epochs.")
    if train.warmup_steps * WARMUP_SHARE > total_steps:
        reached = "few of them are near" if train.warmup_steps <= total_steps else "none of them has"
        found.append(
            f"warmup_steps is {train.warmup_steps} of {total_steps} optimizer steps: {reached} the full learning rate. "
            "--warmup_steps lowers it."
        )
    if given_model and (advice := _usual_rate(config)):
        found.append(f"lr is {train.lr:g}: {advice} --lr sets it.")
    return found


def _usual_rate(config: Config) -> str | None:
    train, use_peft = config.train, config.peft.use_peft
    if train.optimizer not in ADAM:
        return f"{train.optimizer} mostly wants far more, 1e-3 or above." if train.lr <= OTHERS_LR else None
    if use_peft:
        return "adapters mostly get 1e-4 to 3e-4." if train.lr > LORA_LR else None
    if train.lr <= FULL_TUNING_LR:
        return None
    return "all weights of a pretrained model mostly get 1e-5 to 2e-5, lest it forgets (1e-4 is for adapters)."
