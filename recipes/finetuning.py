"""Fine-tune a language model on your data, on any number of processes.

Read it from top to bottom: `main` is the path of a run, `build_model` loads a sharded model,
`train_step` updates its weights once, `train` is the training loop. The functions that they call are
in src/llama_ft, one folder per step.
To change the loss, see llama_ft/training/objectives/sft.py; to change how samples are read,
llama_ft/data/read/formats.py.
"""

from pathlib import Path

from llama_ft.config import Config, check_command_line, load_flags

PLANNER = Path(__file__).with_name("plan.py")
DEMO_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"

if __name__ == "__main__":
    check_command_line(str(__doc__), DEMO_CONFIG)  # before the imports below, which take 6 s

import time  # noqa: E402
from functools import partial  # noqa: E402

import fire  # noqa: E402
import torch  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

from llama_ft import data, models, runtime, training  # noqa: E402
from llama_ft.export import export_adapter, export_model, write_model_card  # noqa: E402
from llama_ft.phases import PhaseMonitor  # noqa: E402
from llama_ft.plan.types import Recipe  # noqa: E402
from llama_ft.run import (  # noqa: E402
    TrainingRun,
    find_model,
    load_best_weights,
    open_run,
    pass_inputs,
    resolve_inputs,
    run_parts,
    start_run,
    tokenize_samples,
    trainer_record,
)
from llama_ft.runtime import Ranks, log  # noqa: E402


@fire.decorators.SetParseFn(str)  # texts, which load_flags checks and converts
def main(**flags: str) -> None:
    """Run a fine-tuning, from the settings to the final model or adapter on disk."""
    with start_run(*load_flags(flags, DEMO_CONFIG), RECIPE, PLANNER) as setup:
        if setup.is_finished:  # a resumed run that has nothing left to do
            return
        ranks = setup.ranks
        objective = build_objective(setup.config)

        # The first rank of each node downloads the model and fills the cache of tokenized samples,
        # which its other ranks read.
        with ranks.local_main_process_first():
            base = find_model(setup.config, ranks)
            dataset = tokenize_samples(setup.config, base, objective, ranks)

        # Check all of this, and plan the batches of all steps, which depend on (seed, epoch, step)
        # only, and the memory. From here on `inputs.config` has the settings, without any auto.
        inputs = resolve_inputs(setup, base, dataset, objective)
        config = inputs.config
        # What the run does in addition, such as --eval_tasks and --save_to. Add your own `Part` here.
        parts = run_parts(setup, inputs)

        # Some objectives need numbers of another model, which is freed before this one is built.
        if first_pass := objective.first_pass(config):
            first_pass.prepare(pass_inputs(setup, inputs), build_model, setup.memory)
        built = build_model(inputs.request, ranks, setup.memory)
        pack_length = inputs.batches.layout.pack_length
        if pack_length is not None:
            # Samples must not see each other: compare a few with samples alone. The chunked loss is
            # compared with that of all logits, too, and turned off if it differs.
            first = inputs.batches.first_samples()
            dtype = runtime.PRECISIONS[config.train.precision].compute
            built.has_chunked_loss = training.check_packing(
                built, first, pack_length, dtype, ranks, dataset.media
            )

        with open_run(setup, inputs, built, parts) as run:
            if first_pass:
                first_pass.complete(built, run.directory)
            train(run, built, objective)
            if config.checkpoint.save_model:
                export(run, built, inputs.tokenizer)
            run.finish()  # the parts; the last one logs a summary


def build_model(
    request: models.ModelRequest, ranks: Ranks | None, memory: PhaseMonitor
) -> models.BuiltModel:
    """Build the model on the meta device, add adapters, shard it, and then load weights, each rank
    its own rows. Steps return what later ones need, and `built` collects it.

    It builds every model: to train, as a reference, for a plan, to answer and to evaluate; for an
    export, without ranks, only on the meta device.
    """
    config = request.config
    log_line = log.debug if request.purpose == "read" else log.info
    quantization = models.choose_quantization(
        config.quantization, request.model_config, request.has_frozen_base
    )
    built = models.build_requested(request)
    model = built.model
    if towers := models.describe_towers(built):  # of a model that takes more than text
        log_line(towers)
    if quantization is not None:
        quantized = models.quantize_linears(built, quantization)
        log.info(str(quantized))  # which layers, and how many weights
    models.fuse_layers(model, config.model, config.train)
    if config.data.batching_strategy == "packing":
        built.mixers = models.use_packed_attention(built, ranks)
    built.router_coefficient = models.use_router_loss(model, config.train.router_aux_loss_coef)
    models.checkpoint_activations(built, config.train)
    if config.peft.use_peft:
        base_name = models.portable_name(config.model.model_name, request.folder)
        built.adapter = models.inject_lora(built, config.peft, base_name, request.new_tokens)
        if experts := models.describe_experts(model):
            log_line(experts)
    if tiled := models.use_tiled_mlp(model, config.train):  # --tiled_mlp
        log_line(tiled)
    models.freeze(model, request)  # freeze_layers, groups, or all of a reference
    built.has_chunked_loss = models.use_chunked_loss(built)
    if not (built.has_chunked_loss or built.has_score):
        log_line("Chunked cross-entropy is off: this model is not a decoder and an LM head.")
    if config.train.neftune_noise_alpha:
        models.add_embedding_noise(model, config.train.neftune_noise_alpha)
    if config.model.compile:
        models.compile_layers(built)
    if ranks is None:
        return built

    models.set_storage_dtypes(model, request.precision)
    if request.is_sharded:
        built.sharding = models.apply_fsdp(built, ranks.mesh, config.fsdp, request.precision)
        if ranks.world_size > 1:  # a single process does not shard
            log_line(models.unit_table(built.sharding.units))

    if request.purpose == "train":
        training.check_own_optimizer(model, config.train)  # --optimizer file.py:function
    memory.enter("load")
    started = time.perf_counter()
    built.stored = models.load_weights(built, ranks, models.LoadSettings.of(request))
    seconds = time.perf_counter() - started
    log_line(f"Weights loaded in {seconds:.1f} s; {models.describe_trained(model)}")
    memory.leave()
    return built


def build_objective(config: Config) -> training.Objective:
    """Return what is trained: cross-entropy of the next token over the tokens in the loss, or
    another objective by --objective."""
    return training.build_objective(config)


def train_step(
    built: models.BuiltModel,
    objective: training.Objective,
    optimizer: torch.optim.Optimizer,
    step: data.StepBatches,
    loop: training.LoopState,
    ranks: Ranks,
) -> training.StepOutcome:
    """Update the weights once, by the mean over the losses of all ranks. The planner runs it, too."""
    step = objective.batches(step, built, ranks)  # as planned, or made with the current weights
    count = step.target_tokens if objective.counts_tokens else step.samples
    losses = []
    for batch in training.micro_batches(built, step, loop, ranks):
        loop.memory.enter("forward")
        loss_sum = objective.loss(built, batch, ranks)
        loop.memory.enter("backward")
        # FSDP adds up gradients of ranks, it does not average them: see models/sharding/fsdp.py.
        (loss_sum.loss / (count / loop.scale.factor)).backward()  # the factor is 1 but in fp16
        losses.append(loss_sum.detach())
    del loss_sum  # frees its graph
    loop.memory.enter("optimizer step")
    gradients = training.local_gradients(built, loop.scale, ranks)
    sums = training.reduce_losses_and_norm(losses, gradients, ranks)
    norm = sums[1]  # of the gradients, before clipping
    training.clip_grad_norm(gradients, norm, loop.settings)
    # Gradients are complete here: `gradients` are this rank's shard of each, on ranks.storage_device.
    # Frozen parameters have none. Replicas (DDP, HYBRID_SHARD) have equal gradients, and must draw
    # equal noise: seed its generator with the step and ranks.shard.rank.
    outcome = training.StepOutcome(step, losses, count, sums)
    outcome.is_skipped = loop.update_loss_scale(outcome)
    failed = loop.failed_so_far(outcome)  # a loss or a norm that is not finite
    if training.may_update(optimizer, failed):
        optimizer.step()
    optimizer.zero_grad()
    return outcome


# The planner runs these, on tensors without values: what you change in them is planned.
RECIPE = Recipe(build_model, build_objective, train_step)


def train(
    run: TrainingRun,
    built: models.BuiltModel,
    objective: training.Objective,
) -> None:
    """Run the training loop. All ranks call it together; rank 0 writes the log.

    On a GPU the loss of a step is read and logged after the next step was queued, so that the GPU
    never waits. (In fp16 it is read at once.)

    The loop ends after the last step, early by early stopping or max_train_time, or by Stopped
    after Ctrl-C or SIGTERM.
    """
    config = run.config
    settings = config.train
    ranks = run.ranks
    state = run.state
    model = built.model
    optimizer = training.build_optimizer(model, settings)  # AdamW, unless --optimizer names another
    loop = training.LoopState(config, state.scale, ranks.device, run.memory)
    torch.manual_seed(settings.seed + ranks.rank)  # a different dropout on each rank
    run.restore(model, optimizer)  # from the resumed checkpoint, if there is one

    with run.training(model, optimizer), data.Prefetcher(run.remaining_steps) as steps:
        if run.resumed is None:
            run.show_answers("before fine-tuning")
            if run.dataset.validations:
                run.log.log_step(0, run.evaluate(objective))
        model.train()
        for step in steps:
            run.begin_step(step, steps.waited_seconds)

            lr = training.learning_rate(
                settings, step.step - 1, run.batches.total_steps, step.epoch
            )
            training.set_learning_rate(optimizer, lr)
            outcome = train_step(built, objective, optimizer, step, loop, ranks)

            # What is due: eval_steps, save_steps, end of an epoch, signals, max_train_time. The
            # numbers of all ranks are gathered: tokens, memory, requests to stop.
            metrics = run.end_step(outcome, lr)
            # Add your own here: metrics["my/number"] = ...
            # A tensor of one number is read later, so that the GPU does not wait for it.
            finished_steps = run.read_losses(outcome)  # ends the run if not finite
            is_best = False
            if outcome.evaluation:
                metrics |= run.evaluate(objective, outcome)
                if "eval/loss" in metrics:  # a signal abandons an evaluation
                    is_best = state.best.update(metrics, step.step)
            run.log_steps(finished_steps)
            if outcome.answers:
                run.show_answers(f"after step {step.step}", outcome)
            if run.save_is_due(outcome, is_best):
                run.save(outcome, is_best, model, optimizer)
            # all steps, early stopping or max_train_time; Ctrl-C, SIGTERM and --stop_after raise
            if run.is_over(outcome):
                break
        load_best_weights(run)
        run.show_answers("after fine-tuning")


def export(run: TrainingRun, built: models.BuiltModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the final model or adapter as safetensors for Transformers and PEFT. Rank 0 gets it
    shard by shard."""
    config = run.config
    result = run.directory / "model"
    run.memory.enter("save")
    torch.cuda.empty_cache()  # NCCL allocates buffers outside of torch's cache at the first send
    auto_class = models.auto_class(built.model.config, config.model.trust_remote_code)
    write_card = partial(
        write_model_card,
        base_model=config.model.model_name,
        trainer=trainer_record(run),
        auto_class=auto_class.__name__,
    )
    write = export_model if built.adapter is None else export_adapter
    write(built, result, config.checkpoint, tokenizer, write_card, run.ranks)


if __name__ == "__main__":
    fire.Fire(main)
