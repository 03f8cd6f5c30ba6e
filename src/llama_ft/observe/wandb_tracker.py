"""Weights & Biases: nothing printed but where the run is, nothing sent but configuration, metrics and machine load.

wandb is imported inside the functions: it takes a second and starts a process of its own.
"""

import contextlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ft.config.sections import TrackingConfig
from llama_ft.errors import UserError
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_SECONDS = 15.0  # after a login that was answered, or took 10 s to fail: under 30 s in all
# Metrics are sent as they come, so little is left at the end; and a rank that failed must end within 30 s.
FINISH_TIMEOUT_SECONDS = 10.0
# A run that ends as preempting with another code than 0 is shown as preempted, not as failed or finished.
STOPPED_EXIT_CODE = 143
OFFLINE_HINT = "--wandb_mode offline needs neither key nor network."


def check_wandb_login(config: TrackingConfig) -> None:
    """Find out whether W&B will take this run, so that a missing key is told before a model is loaded.

    Asks nothing and does nothing unless W&B is to be used online.

    Raises:
        UserError: there is no key, the server refuses it, or the server does not answer within 10 s.
    """
    if not config.use_wandb or config.wandb_mode == "offline":
        return
    # W&B reports its own errors to its makers, failed run and stack included, unless told not to.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.setup(wandb.Settings(mode="online", silent=True))
    try:
        logged_in = wandb.login(prompt=False, verify=True)  # prompt=False: never waits for somebody to type
    except wandb.Error as error:
        raise UserError(
            f"--use_wandb: {_first_line(error)}\n"
            f"Check the network and the key (wandb login --relogin), or {OFFLINE_HINT}"
        ) from error
    if not logged_in:
        raise UserError(
            f"--use_wandb: this machine has no W&B key.\nRun wandb login, or set WANDB_API_KEY; {OFFLINE_HINT}"
        )


class WandbTracker:
    """One W&B run, its files in output_dir/wandb.

    Going on with a run online, W&B keeps what it has of it and takes nothing for those steps again. (`resume_from`,
    which would cut them off, is a preview that not every server has.) Offline it cannot know what the server has, and
    uploading a "resumed" run would number its steps on from there; so each attempt is the whole run, under the same id,
    and uploading the last one replaces what was uploaded before.

    Args:
        config: project, entity, name, tags and mode.
        output_dir: the run's directory; its name is the run's name when none is given.
        resolved: the run's configuration as plain values.
        resume_step: the step that is resumed from; None for a new run.
        run_id: the W&B run to go on with.

    Raises:
        UserError: the run is online and W&B does not take it.
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
        self._offline = config.wandb_mode == "offline"
        check_wandb_login(config)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        try:
            self._run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                name=config.wandb_name or output_dir.resolve().name,
                tags=config.wandb_tags,
                dir=str(output_dir),
                config=resolved,
                id=run_id,
                resume="allow" if run_id and not self._offline else None,
                settings=_private_settings(config),
            )
        except wandb.Error as error:
            deleted = f"A run that was deleted there ({run_id}?) goes on in another project only. " if run_id else ""
            raise UserError(
                f"--use_wandb: W&B did not take the run: {_first_line(error)}\n{deleted}"
                f"Check --wandb_entity and --wandb_project; {OFFLINE_HINT}"
            ) from error
        self.ids = {"wandb": self._run.id}
        self._first_step = self._run.starting_step
        self._run_dir = Path(self._run.settings.sync_dir)
        if not self._offline:
            log.info(f"W&B: {self._run.url}{self._what_goes_on(resume_step, run_id)}")

    def _what_goes_on(self, resume_step: int | None, run_id: str | None) -> str:
        if resume_step is None or run_id is None:
            return ""
        if not self._run.resumed:
            return f"\n  Run {run_id} was not in this project before: it gets all steps."
        known = f"; up to step {self._first_step - 1} it keeps what was logged before"
        return " goes on" + (known if self._first_step > resume_step + 1 else "")

    def log(self, metrics: Metrics, step: int) -> None:
        if step >= self._first_step:  # W&B would drop the others, with a warning each
            self._run.log(one_series_per_rank(metrics), step=step)

    def finish(self, exit_code: int, stopped: bool = False) -> None:
        """Send what is left, for 10 s at most, and say how to send what could not be."""
        import wandb

        sync = f"wandb sync {'' if self._offline else '--include-online '}{shlex.quote(str(self._run_dir))}"
        try:
            if stopped:
                self._run.mark_preempting()
                exit_code = exit_code or STOPPED_EXIT_CODE
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            log.warning(f"W&B did not get everything ({_first_line(error)}). {sync} sends the rest.")
        else:
            if self._offline:
                log.info(f"W&B: {sync} uploads this run.")
        with contextlib.suppress(Exception):  # ends wandb's process; left to atexit, a broken one prints a traceback
            wandb.teardown(exit_code)


def _private_settings(config: TrackingConfig) -> "wandb.Settings":
    """Settings that keep code, console, git state, host, user, paths, arguments and package lists at home.

    System metrics (GPU and host load, sampled every 15 s by wandb's own process) stay on.
    """
    import wandb

    return wandb.Settings(
        mode=config.wandb_mode,
        silent=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        host="",  # x_disable_meta leaves these two in what the run is registered with
        program="",
        x_save_requirements=False,
        init_timeout=INIT_TIMEOUT_SECONDS,
        finish_timeout=FINISH_TIMEOUT_SECONDS,
        finish_timeout_raises=True,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
