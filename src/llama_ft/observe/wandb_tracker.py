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

    Args:
        config: project, entity, name, tags and mode.
        output_dir: the run's directory; its name is the run's name when none is given.
        resolved: the run's configuration as plain values.

    Raises:
        UserError: the run is online and W&B does not take it.
    """

    name = "W&B"

    def __init__(self, config: TrackingConfig, output_dir: Path, resolved: dict[str, Any]) -> None:
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
                settings=_private_settings(config),
            )
        except wandb.Error as error:
            raise UserError(
                f"--use_wandb: W&B did not take the run: {_first_line(error)}\n"
                f"Check --wandb_entity and --wandb_project; {OFFLINE_HINT}"
            ) from error
        self._offline = config.wandb_mode == "offline"
        self._run_dir = Path(self._run.settings.sync_dir)
        if not self._offline:
            log.info(f"W&B: {self._run.url}")

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(one_series_per_rank(metrics), step=step)

    def finish(self, exit_code: int) -> None:
        """Send what is left, for 10 s at most, and say how to send what could not be."""
        import wandb

        sync = f"wandb sync {shlex.quote(str(self._run_dir))}"
        try:
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
