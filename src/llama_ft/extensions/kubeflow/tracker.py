"""Report progress to Kubeflow Trainer, which shows it in the TrainJob's status.

Its controller sets the variables below, and the URL, in each pod. Source: KEP-2779 of kubeflow/trainer.
"""

import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llama_ft.errors import reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.trackers import Tracker
from llama_ft.runtime.console import log

TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a file, which Kubernetes renews
CERTIFICATE_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # a file
SECONDS_BETWEEN = 5.0
REQUEST_SECONDS = 5.0
SHOWN = ("train/", "eval/")  # a TrainJob should not hold all metrics


class KubeflowTracker(Tracker):
    """Sends the newest step, its metrics and the remaining time, at most every 5 s, in a thread. A
    server that does not answer is one warning.

    Args:
        url: of this TrainJob's status.
        total_steps: of the run.
        resume_step: the step of the resumed checkpoint; None for a new run.
    """

    name = "Kubeflow Trainer"
    key = "kubeflow"

    def __init__(self, url: str, total_steps: int, resume_step: int | None) -> None:
        self.first_step = (resume_step or 0) + 1
        self._url = url
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._status: dict[str, Any] = {}
        self._changed = threading.Event()
        self._warned = False
        self._lock = threading.Lock()  # one request at a time, so that the last one is the newest
        threading.Thread(target=self._send_newest, name="kubeflow", daemon=True).start()

    def log(self, series: Mapping[str, float], step: int) -> None:
        """Store the values for the next request."""
        metrics = {"step": float(step)}
        for name, value in series.items():
            if name.startswith(SHOWN):
                metrics[name] = value
        steps_done = step - self.first_step + 1
        seconds_per_step = (time.monotonic() - self._started) / steps_done
        percentage = 100 * step // self._total_steps
        self._status = {
            "progressPercentage": min(percentage, 99),  # 100 when the model is written
            "estimatedRemainingSeconds": int(seconds_per_step * (self._total_steps - step)),
            "metrics": [{"name": name, "value": f"{value:g}"} for name, value in metrics.items()],
        }
        self._changed.set()

    def finish(self, exit_code: int, stopped: bool) -> None:
        """Send the last state."""
        if exit_code == 0 and not stopped:
            self._status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        if self._status:
            self._send()

    def _send_newest(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self._send()
            threading.Event().wait(SECONDS_BETWEEN)

    def _send(self) -> None:
        """Send the newest state. An error does not end the run."""
        with self._lock:
            try:
                self._post()
            except Exception as error:
                if not self._warned:
                    cause = mask_secrets(reason(error))
                    log.warning(f"{self.name} does not take the progress of this run: {cause}")
                self._warned = True

    def _post(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = json.dumps({"trainerStatus": {**self._status, "lastUpdatedTime": now}})
        token = Path(os.environ[TOKEN_VARIABLE]).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, content.encode(), headers, method="POST")
        context = ssl.create_default_context(cafile=os.environ.get(CERTIFICATE_VARIABLE))
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=context):
            pass
