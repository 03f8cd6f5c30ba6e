"""Weights & Biases: nothing printed but where the run is, and nothing sent but configuration, commit, metrics, the
sample's answers, machine load and, where it is asked for, the result.

wandb is imported inside the functions: it takes a second and starts a process of its own.
"""

import contextlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError, reason
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from llama_ft.observe.trackers import Samples

# A run that ends as preempting with another code than 0 is shown as preempted, not as failed or finished.
STOPPED_EXIT_CODE = 143
# Code, console, git state, host, user, paths, arguments and package lists stay at home. The load of GPUs and host is
# sent: wandb's own process samples it every 15 s.
PRIVATE: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "host": "",  # x_disable_meta leaves these two in what the run is registered with
    "program": "",
    "x_save_requirements": False,
    "init_timeout": 15.0,  # after a login that was answered, or took 10 s to fail: under 30 s in all
    "finish_timeout": 10.0,  # metrics are sent as they come, so little is left; a rank that failed must end within 30 s
    "finish_timeout_raises": True,
}
OFFLINE_HINT = "--wandb_mode offline needs neither key nor network."
# What the table of runs shows of a metric; of the others their last value.
SUMMARIES = dict.fromkeys(("eval/loss", "eval/perplexity"), "min,last") | {"perf/*": "mean", "memory/*": "max"}


def wandb_mode(config: TrackingConfig) -> str:
    """Return online, offline or disabled: the setting, else what WANDB_MODE says, else online."""
    return config.wandb_mode or os.environ.get("WANDB_MODE", "").lower() or "online"


def check_wandb_login(config: TrackingConfig) -> None:
    """Find out whether W&B will take this run, so that a missing key is told before a model is loaded.

    Raises:
        UserError: there is no key, the server refuses it, or the server does not answer within 10 s.
    """
    # W&B reports its own errors to its makers, failed run and stack included, unless told not to.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if wandb_mode(config) != "online":
        return
    import wandb

    wandb.setup(wandb.Settings(mode="online", silent=True))
    try:
        logged_in = wandb.login(prompt=False, verify=True)  # prompt=False: never waits for somebody to type
    except wandb.Error as error:
        raise UserError(
            f"--use_wandb: {reason(error)}\nCheck the network and the key (wandb login --relogin), or {OFFLINE_HINT}"
        ) from error
    if not logged_in:
        raise UserError(
            f"--use_wandb: this machine has no W&B key.\nRun wandb login, or set WANDB_API_KEY; {OFFLINE_HINT}"
        )


class WandbTracker:
    """One W&B run, its files in output_dir/wandb; see start_trackers.

    Of a resumed run online, W&B keeps what it has and takes nothing for those steps again. (`resume_from`, which would
    cut them off, is a preview that not every server has.) Offline it cannot know what the server has, and uploading a
    "resumed" run would number its steps on from there; so each attempt is the whole run, under the same id, and
    uploading the last one replaces what was uploaded before.
    """

    name = "W&B"

    def __init__(
        self,
        config: TrackingConfig,
        output_dir: Path,
        resolved: dict[str, Any],
        resume_step: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self.takes_result = config.wandb_log_model
        self._offline = wandb_mode(config) == "offline"
        check_wandb_login(config)
        import wandb

        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                job_type=config.wandb_job_type,
                notes=config.wandb_notes,
                tags=config.wandb_tags,
                name=config.wandb_name or output_dir.resolve().name,
                group=config.wandb_group,
                dir=str(output_dir),
                config=resolved,
                id=run_id,
                resume="allow" if run_id and resume_step is not None and not self._offline else None,
                settings=wandb.Settings(mode=wandb_mode(config), **PRIVATE),
            )
        except (wandb.Error, ValueError) as error:  # the latter of a tag that is too long
            raise UserError(
                f"--use_wandb: W&B did not take the run: {' '.join(str(error).split())}\n{OFFLINE_HINT}"
            ) from error
        self.ids = {"wandb": self._run.id}
        self._first_step = self._run.starting_step
        for metric, summary in SUMMARIES.items():
            self._run.define_metric(metric, summary=summary)
        if not self._offline:
            log.info(f"W&B: {self._run.url}{' goes on' if self._run.resumed else ''}")

    def log(self, metrics: Metrics, step: int) -> None:
        if step >= self._first_step:  # W&B would drop the others, with a warning each
            self._run.log(one_series_per_rank(metrics), step=step)

    def log_samples(self, samples: "Samples", step: int) -> None:
        """A table of the answers before and after fine-tuning."""
        import wandb

        columns: list[int | str] = ["when", "question", "answer", "reference"]
        table = wandb.Table(columns=columns, data=[[sample[str(name)] for name in columns] for sample in samples])
        self._run.log({"samples": table}, step=max(step, self._first_step))

    def log_result(self, folder: Path, step: int, is_best: bool, base_model: str) -> None:
        """Upload it as the artifact model-<run id>; offline it stays where it is until `wandb sync` takes it. Neither
        way copies it: W&B's staging folder would need its size once more in the user's home."""
        import wandb

        metadata = {"base_model": base_model, "step": step}
        artifact = wandb.Artifact(f"model-{self._run.id}", "model", metadata=metadata)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):  # add_dir would print
            name = str(file.relative_to(folder))
            artifact.add_file(str(file), name, skip_cache=True, policy="immutable")
        aliases = ["latest", f"step-{step}", *(["best"] if is_best else [])]
        logged = self._run.log_artifact(artifact, aliases=aliases)
        if not self._offline:
            logged.wait()
            log.info(f"W&B: {folder} is {artifact.name}, {', '.join(aliases)}.")

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Send what is left, for 10 s at most, and say how to send what could not be."""
        import wandb

        folder = shlex.quote(str(Path(self._run.settings.sync_dir)))
        sync = f"wandb sync {'' if self._offline else '--include-online '}{folder}"
        try:
            if stopped:
                self._run.mark_preempting()
                exit_code = exit_code or STOPPED_EXIT_CODE
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            log.warning(f"W&B did not get everything ({reason(error)}). {sync} sends the rest.")
        else:
            if self._offline:
                log.info(f"W&B: {sync} uploads this run.")
        with contextlib.suppress(Exception):  # ends wandb's process; left to atexit, a broken one prints a traceback
            wandb.teardown(exit_code)
