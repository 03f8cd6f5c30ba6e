"""A run in a TrainJob whose controller wants to know its progress reports it."""

import os

from llama_ft.door import Extension

# Kubeflow Trainer sets it in each pod
URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"

EXTENSION = Extension(
    part="llama_ft.extensions.kubeflow.part:KubeflowProgress",
    needs_part=lambda config: bool(os.environ.get(URL_VARIABLE)),
)
