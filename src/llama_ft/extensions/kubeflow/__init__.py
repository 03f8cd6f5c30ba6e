"""Progress of a run for Kubeflow Trainer."""
