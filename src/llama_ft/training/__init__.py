"""What the training loop calls: the loss, one step, the learning rate, evaluation."""

from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.training.advice import advice
from llama_ft.training.check_packing import check_packing
from llama_ft.training.evaluation import (
    SamplePrompt,
    Scores,
    answer_prompts,
    check_sample_prompts,
    evaluation_metrics,
    log_answers,
    loss_sums,
    open_scores,
    sample_prompts,
    together,
)
from llama_ft.training.objectives import build_objective, resolve_format
from llama_ft.training.objectives.base import (
    LossSum,
    Objective,
    target_examples,
    target_losses,
)
from llama_ft.training.objectives.first_pass import PassInputs
from llama_ft.training.objectives.reward import set_pad_token
from llama_ft.training.objectives.sft import SupervisedFineTuning
from llama_ft.training.optimizer import (
    build_optimizer,
    check_own_optimizer,
    learning_rate,
    warmup_steps,
)
from llama_ft.training.step import (
    LoopState,
    PendingMetrics,
    StepOutcome,
    clip_grad_norm,
    is_due,
    local_gradients,
    may_update,
    micro_batches,
    read_loss_or_stop,
    reduce_losses_and_norm,
    set_learning_rate,
)
from llama_ft.training.train_state import TrainState
