"""Weights & Biases: it gets configuration, commit, metrics, machine load and, where it is asked for, the result.

wandb is imported inside the functions: it takes a second and starts a process of its own.
"""

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import UserError, reason
from llama_ft.observe.metrics import Metrics, one_series_per_rank
from llama_ft.runtime.console import log

STOPPED_EXIT_CODE = 143  # of a run that W&B shows as preempted, not as failed or finished
# Code, console, git state, host, user, paths, arguments and package lists stay at home.
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


def wandb_mode(config: TrackingConfig) -> str:
    """Return online, offline or disabled: the setting, else what WANDB_MODE says, else online."""
    return config.wandb_mode or os.environ.get("WANDB_MODE", "").lower() or "online"


def check_wandb_login(config: TrackingConfig) -> None:
    """Find out whether W&B will take this run.

    Raises:
        UserError: there is no key, the server refuses it, or the server does not answer within 10 s.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers, with the failed run and its stack
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

    Of a resumed run online, W&B keeps what it has and takes nothing for those steps again. Offline it cannot know what
    the server has; so each attempt is the whole run, under the same id, and uploading the last one replaces the others.
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
            raise UserError(f"--use_wandb: W&B did not take the run: {reason(error)}\n{OFFLINE_HINT}") from error
        self.ids = {"wandb": self._run.id}
        self._first_step = self._run.starting_step
        if not self._offline:
            log.info(f"W&B: {self._run.url}{' goes on' if self._run.resumed else ''}")

    def log(self, metrics: Metrics, step: int) -> None:
        if step >= self._first_step:  # W&B would drop the others, with a warning each
            self._run.log(one_series_per_rank(metrics), step=step)

    def log_result(self, folder: Path, step: int, is_best: bool) -> None:
        """Upload it as the artifact model-<run id>; offline, `wandb sync` does."""
        aliases = ["latest", f"step-{step}", *(["best"] if is_best else [])]
        logged = self._run.log_artifact(str(folder), f"model-{self._run.id}", "model", aliases=aliases)
        if not self._offline:
            logged.wait()

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
