"""Fine-tune a language model on your data, on any number of processes.

Read it from top to bottom: `main` is the path of a run, `build_model` how a model gets onto the ranks, `train` the
training loop. What happens inside each line is in src/llama_ft, one folder a step. To change the loss, see
llama_ft/training/objective.py; to change what a row becomes, llama_ft/data.
"""

from pathlib import Path
from typing import Any

from llama_ft.config import (
    Config,
    check_command_line,
    check_device,
    differences,
    load_flags,
    parse_duration,
    parse_size,
    to_yaml,
)

PLANNER = Path(__file__).with_name("plan.py")
DEMO_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"

if __name__ == "__main__":
    check_command_line(str(__doc__), DEMO_CONFIG)  # before the imports below, which take 6 s

import dataclasses  # noqa: E402
import time  # noqa: E402
from functools import partial  # noqa: E402

import fire  # noqa: E402
import torch  # noqa: E402
from transformers import PretrainedConfig, PreTrainedTokenizerBase  # noqa: E402
from transformers.modeling_utils import PreTrainedModel  # noqa: E402

from llama_ft import checkpoint, data, models, observe, report, runtime, training  # noqa: E402
from llama_ft.phases import PhaseMonitor  # noqa: E402
from llama_ft.plan.oom_report import explain_errors  # noqa: E402
from llama_ft.plan.preflight import Preflight  # noqa: E402
from llama_ft.runtime import Runtime, log  # noqa: E402


@fire.decorators.SetParseFn(str)
def main(**flags: str) -> None:
    """One run, from the settings to the result on disk."""
    config, places = load_flags(flags, DEMO_CONFIG)
    settings, allowed_changes = config.train, config.checkpoint.resume_allow_changes
    degree, offload = models.shard_degree(config.fsdp), config.fsdp.fsdp_cpu_offload
    timeout = parse_duration(settings.collective_timeout)
    preflight = Preflight(build_model, off=config.memory.no_plan)
    with (
        runtime.start(settings.device, degree, offload, settings.device_memory_fraction, timeout) as job,
        observe.MemoryMonitor(job) as watch,
        explain_errors(config, job, watch, PLANNER),
    ):
        resumed = checkpoint.find_checkpoint(config.checkpoint, job)
        config = settle(config, places, job, resumed)
        log.info("\n  ".join(["Settings that differ from the defaults:", *differences(config)]))
        settings, about = config.train, checkpoint.describe_run(config)
        if resumed is not None:
            checkpoint.check_same_run(resumed.trainer, about, allowed_changes, places)
            if result := checkpoint.finished_result(resumed, config.checkpoint):
                log.info(f"This run was finished after step {resumed.step}; its result is {result}")
                job.begin_run(resumed.run, resumed.step)
                return
        about["global_batch"] = batch = checkpoint.global_batch(settings, resumed, job.world_size)
        unit = "pack" if config.data.batching_strategy == "packing" else "row"
        layout = job.describe(settings.batch_size_training, settings.gradient_accumulation_steps, batch, unit)
        log.info(layout)
        if job.is_main:
            observe.check_trackers(config.tracking, config.checkpoint.output_dir)

        # What is trained on what. The demo stands in for a model and for data that were not given.
        with job.local_main_process_first():
            folder, tokenizer = find_model(config, ask_hub=job.local_rank == 0)
        model_config = models.load_model_config(folder, config.model.trust_remote_code)
        context_length = models.resolve_context_length(config.data.context_length, model_config)
        with job.local_main_process_first():
            rows = data.prepare(
                config.data,
                tokenizer,
                context_length=context_length,
                cache=data.cache_dir(),
                want_validation=settings.run_validation,
                vocabulary_size=None if config.model.resize_embeddings else models.vocabulary_size(model_config),
                add_tokens=config.model.resize_embeddings,
                verify=job.local_rank == 0,
                examples=training.SupervisedFineTuning.examples,
            )
        log.info("\n".join(rows.summary))
        if job.is_main:
            checkpoint.check_export(model_config, tokenizer, folder)
        new_tokens = models.find_new_tokens(tokenizer, folder, model_config, config.model)
        about["contents"] = {"model_name": models.fingerprint(folder), **rows.fingerprints()}
        about["chat_template"] = tokenizer.chat_template
        about["new_tokens"] = new_tokens and dataclasses.asdict(new_tokens)
        if resumed is not None:
            checkpoint.check_same_run(resumed.trainer, about, allowed_changes, places)
        # Which rows this rank sees at which step: a function of (seed, epoch, step) and of nothing else.
        vocabulary = new_tokens.rows if new_tokens else models.vocabulary_size(model_config)
        pad = data.pad_token_id(tokenizer, vocabulary)
        steps = data.plan_training(config, rows, context_length, batch, pad, vocabulary, job)
        log.info(steps.describe())
        for doubt in training.advice(config, steps.total_steps, batch, steps.size):
            log.warning(doubt)
        if config.data.show_samples:
            data.show_samples(steps.first_rows(), tokenizer, config.data.show_samples)
        if resumed is not None:
            checkpoint.check_steps_left(resumed, steps.total_steps)

        # Answered while the weights are loaded; and here, where it is to choose what is recomputed.
        config = preflight.ask(config, folder, new_tokens, rows, steps, job)
        about["config"] = dataclasses.asdict(config)
        model, adapter, stored_dtypes, units = build_model(config, folder, model_config, new_tokens, watch, job)
        watch.loaded(model)
        if steps.pack_length is not None:
            dtype = runtime.PRECISIONS[settings.precision].compute
            training.check_packing(model, steps.first_rows(), steps.pack_length, dtype, job)

        # From here on something is written: until now a mistake has left nothing behind.
        output_dir = checkpoint.create_run_directory(config.checkpoint, config.model.model_name, job, resumed)
        log.info(f"Run directory: {output_dir}")
        job.begin_run(output_dir, resumed.step if resumed else 0, at_end=partial(report.write_or_warn, output_dir))
        if job.is_main:
            repeat = f"--config {output_dir}/config.yaml repeats this run"
            (output_dir / "config.yaml").write_text(to_yaml(config, repeat))
        preflight.tell(output_dir)
        facts = observe.RunMetadata(output_dir, job.is_main)
        facts.add(environment=observe.environment(about["versions"], layout), data=rows.facts())
        facts.add(units=[dataclasses.asdict(unit) for unit in units], total_steps=steps.total_steps)
        writer = checkpoint.CheckpointWriter(output_dir, config.checkpoint, about, job)

        # metrics.jsonl, progress bar, W&B, TensorBoard, MLflow, of rank 0.
        resolved, earlier = dataclasses.asdict(config), dict[str, Any]()
        if resumed is not None:
            ids = resumed.trainer["trackers"]
            earlier = {"resume_step": resumed.step, "resumed_dir": resumed.run, "tracker_ids": ids}
        with observe.RunLog(output_dir, config.tracking, resolved, steps.total_steps, job.rank, **earlier) as run_log:
            outcome = train(config, model, tokenizer, rows, steps, pad, writer, facts, run_log, resumed, watch, job)
            if config.checkpoint.save_model:
                facts.add(weights_of=outcome["weights_of"])
                watch.enter("save")
                result = output_dir / "model"
                save_dtype = checkpoint.save_dtype(config.checkpoint.save_dtype)
                base, trainer = config.model.model_name, {**outcome, **about}
                write_card = partial(checkpoint.write_model_card, base_model=base, trainer=trainer)
                if adapter is not None:
                    checkpoint.export_adapter(model, adapter, result, save_dtype, tokenizer, write_card, job)
                else:
                    largest_file = parse_size(config.checkpoint.max_shard_size)
                    checkpoint.export_model(
                        model, result, folder, stored_dtypes, save_dtype, largest_file, tokenizer, write_card, job
                    )
                log.info(f"The tuned {'adapter' if adapter else 'model'}: {result}")
                run_log.log_result(result, outcome, base, seconds=timeout / 2)  # the other ranks wait for it


def settle(config: Config, places: dict[str, str], job: Runtime, resumed: checkpoint.Checkpoint | None) -> Config:
    """Choose what only the machine can tell: the demo's precision. Rank 0 decides for all; a resumed run keeps its
    own."""
    check_device(config, places, job.device.type)
    is_free = config.model.model_name == "demo" and "train.precision" not in places
    wanted = resumed.trainer["config"]["train"]["precision"] if resumed and is_free else config.train.precision
    is_free = is_free and resumed is None
    precision, note = job.broadcast_from_rank0(lambda: runtime.advise_precision(wanted, is_free, job.device))
    if note:
        log.info(note)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision))


def find_model(config: Config, ask_hub: bool) -> tuple[Path, PreTrainedTokenizerBase]:
    """The model's folder and its tokenizer: the demo's, a local one, or the hub's, which one rank a node asks."""
    wanted = config.model
    if "demo" in (wanted.model_name, config.data.dataset):
        demo = data.build_demo(data.cache_dir())
        if wanted.model_name == "demo":
            log.info(demo.about_model)
        if config.data.dataset == "demo":
            log.info(demo.about_rows)
    is_demo = wanted.model_name == "demo"
    folder = demo.model_dir if is_demo else models.local_folder(wanted.model_name, "--model_name", ask_hub)
    tokens = folder
    if wanted.tokenizer_name is not None:
        tokens = models.local_folder(wanted.tokenizer_name, "--tokenizer_name", ask_hub, weights=False)
    return folder, models.load_tokenizer(tokens, wanted.trust_remote_code)


def build_model(
    config: Config,
    folder: Path,
    model_config: PretrainedConfig,
    new_tokens: models.NewTokens | None,
    watch: PhaseMonitor,
    job: Runtime,
) -> tuple[PreTrainedModel, models.Adapter | None, dict[str, torch.dtype], list[models.Unit]]:
    """A skeleton without storage, adapters, shards; only then weights, each rank its own rows."""
    precision = runtime.PRECISIONS[config.train.precision]
    quantization = models.choose_quantization(config.quantization, model_config, config.peft.use_peft)
    model = models.build_on_meta(model_config, config.model, new_tokens)
    if quantization is not None:
        log.info(models.quantize_linears(model, quantization))
    if config.model.use_liger:
        models.apply_liger(model, config.train)
    if config.data.batching_strategy == "packing":
        models.use_packed_attention(model)
    models.checkpoint_activations(model, config.train)
    base_name = models.portable_name(config.model.model_name, folder)
    adapter = models.inject_lora(model, config.peft, base_name, new_tokens) if config.peft.use_peft else None
    if config.model.freeze_layers:
        models.freeze_first_layers(model, config.model.num_freeze_layers)
    if not models.use_chunked_loss(model):
        log.info("The loss is computed from all logits at once: this model is not a decoder and a head.")
    if config.model.compile:
        models.compile_layers(model)
    models.set_storage_dtypes(model, precision)
    units = models.apply_fsdp(model, job.mesh, config.fsdp, precision)
    log.info(models.unit_table(units))
    watch.enter("load")
    started = time.perf_counter()
    stored_dtypes = models.load_weights(
        model,
        folder,
        models.ShardGroup(job.mesh),
        job.device,
        job.storage_device,
        scatter=config.fsdp.low_cpu_fsdp,
        adapter=adapter,
        peft=config.peft,
        seed=config.train.seed,
        frozen_dtype=precision.frozen,
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = time.perf_counter() - started
    log.info(
        f"Weights loaded in {seconds:.1f} s; {trained:,} of {models.total_weights(model):,} parameters are trained"
    )
    return model, adapter, stored_dtypes, units


def train(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: data.TokenizedData,
    steps: data.TrainingBatches,
    pad: int,
    writer: checkpoint.CheckpointWriter,
    facts: observe.RunMetadata,
    run_log: observe.RunLog,
    resumed: checkpoint.Checkpoint | None,
    watch: observe.MemoryMonitor,
    job: Runtime,
) -> dict[str, Any]:
    """The training loop. Every rank runs it in step; rank 0 keeps the log. Returns the last step and its metrics, and
    the steps of the weights and of the best validation loss."""
    settings = config.train
    optimizer = training.build_optimizer(model, settings)
    objective = training.SupervisedFineTuning()
    log.info(training.describe_optimizer(optimizer))
    reduce_last_only = config.peft.use_peft or settings.accumulate_unsharded
    total_steps = steps.total_steps
    torch.manual_seed(settings.seed + job.rank)  # dropout differs between ranks
    progress, metrics = training.TrainState(settings), dict[str, Any]()
    if resumed is not None:
        progress.load_state_dict(resumed.trainer["progress"])
        checkpoint.restore(resumed, model, optimizer, settings, job)
        metrics = resumed.trainer["metrics"]
    best, scale, unread = progress.best, progress.scale, training.PendingMetrics(job.device)
    started_after = progress.step
    dtype = runtime.PRECISIONS[settings.precision].compute
    speed = observe.ThroughputMeter(model, config.profile, dtype, writer.run, facts, job)
    watch.begin_training(model, optimizer, facts)

    last = progress.step if best.should_stop else total_steps
    feed = data.Prefetcher(steps.steps(progress.step + 1, last, progress.position))
    with run_log.training(), writer, job.signals.between_steps(settings.stop_after), feed, speed:
        if resumed is None:
            watch.enter("evaluation")
            shown = training.show_answer("Before", model, tokenizer, rows.chat_sample, settings.sample_tokens, pad, job)
            facts.add_sample("before", shown)
            if rows.validation is not None:
                run_log.log_step(
                    0, training.evaluate(model, objective, rows.validation, settings, pad, steps.pack_length, job)
                )
        model.train()
        for todo in feed:
            step, batches = todo.step, todo.batches
            speed.begin_step(step, batches, feed.waited_seconds)
            if step == 1:
                log.info(data.describe_first_batch(batches[0], tokenizer))

            # This rank's micro-batches: forward and backward, then a few numbers from each rank.
            losses = training.accumulate_gradients(
                model, objective, batches, todo.target_tokens, reduce_last_only, job, scale.factor, watch
            )
            watch.enter("optimizer step")
            numbers = training.clip_and_reduce_norm(model, losses, todo.target_tokens, settings, scale.factor, job)
            ranks = job.all_gather_floats(
                sum(batch.tokens for batch in batches),
                watch.host_peak_bytes,
                watch.device_peak_bytes,
                job.signals.asked(),
                writer.has_failed,
                *watch.growth(),
                speed.flops,
            )  # [ranks, 8]
            skipped = scale.is_used and scale.note(step, *numbers.read())  # fp16 has to know at once
            lr = training.learning_rate(settings, step - 1, total_steps, todo.epoch)
            training.update_weights(optimizer, lr, numbers.failed if skipped else unread.failed_with(numbers))
            if step == scale.skipped_steps + 1:  # the first that was not skipped has made the states
                log.info(training.describe_state(optimizer, job))
            watch.end_step(ranks[:, 5:7])
            speed.end_step(step, ranks[:, 0].sum().item(), ranks[:, 7].sum().item())

            progress.step, progress.position = step, todo.position
            progress.target_tokens += todo.target_tokens
            metrics = {
                "epoch": todo.epochs_seen,
                "tokens": progress.target_tokens,
                "train/lr": lr,
                **observe.memory_metrics(ranks[:, 1:3]),
                **scale.metrics(),
            }
            is_last = step == total_steps
            is_best = False
            stop = job.signals.agreed(ranks[:, 3])
            evaluates = rows.validation is not None
            evaluates &= training.is_due(step, settings.eval_steps, todo.ends_epoch or is_last)
            saves = writer.is_due(step, todo.ends_epoch, is_last or stop is not None)

            # A GPU is still at this step; its loss is read when the next one has been sent, or where it is needed now.
            newest = training.Step(step, numbers, losses, batches, metrics, skipped)
            for read in unread.take(newest, needed=evaluates or saves or is_last or stop is not None):
                training.stop_if_not_finite(read, writer.newest, job)
                read.metrics.update(speed.metrics(read.step))
                if evaluates and read is newest:
                    watch.enter("evaluation")
                    metrics |= training.evaluate(
                        model, objective, rows.validation, settings, pad, steps.pack_length, job
                    )
                    is_best = best.update(metrics["eval/loss"], step)
                ends = read is newest and (evaluates or is_last)
                if training.is_due(read.step, settings.log_steps, ends):
                    run_log.log_step(read.step, read.metrics | writer.timings())

            # Saving, and stopping: the ranks agree, since what is asked for has been gathered above.
            if ranks[:, 4].any():
                writer.finish()  # tells what has failed
            ends_run = is_last or best.should_stop
            saves |= writer.is_due(step, todo.ends_epoch, ends_run)
            if saves or (is_best and config.checkpoint.save_model):
                state: dict[str, Any] = {"progress": progress.state_dict(), "ends_run": ends_run, "metrics": metrics}
                state["trackers"] = run_log.tracker_ids
                watch.enter("save")
                writer.save(step, model, optimizer, state, saves, best.loss if is_best else None)
            job.note_step(step)
            if config.memory.memory_snapshot and step == min(started_after + observe.SNAPSHOT_STEPS, total_steps):
                log.info(f"Memory snapshot: {observe.write_snapshot(writer.run, job.rank, f'step-{step}')}")
            if best.should_stop:
                log.info(f"Stopped early after step {step}: the validation loss was best at step {best.step}.")
                break
            if stop is not None and not ends_run:
                writer.finish()
                raise runtime.Stopped(stop, step, writer.last)
        writer.finish()
        weights_of = progress.step
        if (result_step := checkpoint.result_step(config, progress.step, best.step)) != progress.step:
            if (kept := checkpoint.open_best(result_step, writer.run, job)) is not None:
                checkpoint.restore_weights(kept, model)
                weights_of = result_step
                log.info(f"The weights of step {best.step}, with the best validation loss {best.loss:.4f}, are taken.")
        watch.enter("evaluation")
        shown = training.show_answer("After", model, tokenizer, rows.chat_sample, settings.sample_tokens, pad, job)
        facts.add_sample("after", shown)
        run_log.log_samples(facts.samples)
    return {"step": progress.step, "metrics": metrics, "weights_of": weights_of, "best_step": best.step}


if __name__ == "__main__":
    fire.Fire(main)
