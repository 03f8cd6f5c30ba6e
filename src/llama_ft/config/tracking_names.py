"""Names that W&B and MLflow would refuse, and the places where MLflow can keep runs."""

import re

from llama_ft.masking import holds_key, is_secret_name, is_url_with_secret

# What stands in them is shown to everybody who sees the run.
TRACKED_TEXTS = (
    *("wandb_project", "wandb_entity", "wandb_name", "wandb_group", "wandb_job_type", "wandb_tags", "wandb_notes"),
    *("mlflow_experiment", "mlflow_name"),
)
PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
FOLDER = re.compile(r"(/|\.|~|[^:]*$)")
SCHEMES = ("http://", "https://", "file:", "sqlite:///", "databricks")
WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*@", re.IGNORECASE)
NO_HOST = re.compile(r"https?://([/:?#]|$)", re.IGNORECASE)
MLFLOW_NAME = re.compile(r"[\w.\-/: ]{1,250}")


def project_complaint(wandb_project: str) -> str | None:
    """Say why W&B would refuse a project's name."""
    if PROJECT.fullmatch(wandb_project) or holds_key(wandb_project):  # which is not repeated
        return None
    return f"is {wandb_project!r}; W&B takes 1 to 128 characters, none of them / \\ # ? % or a colon."


def wandb_tags_complaint(wandb_tags: list[str]) -> str | None:
    """Say which tags W&B would refuse."""
    wrong = [tag for tag in wandb_tags if not 1 <= len(tag) <= 64 and not holds_key(tag)]
    return f"has {wrong[0]!r}; W&B takes tags of 1 to 64 characters." if wrong else None


def wandb_name_complaint(wandb_name: str | None) -> str | None:
    """Say why W&B would refuse a run's name."""
    return _length_complaint(wandb_name)


def wandb_group_complaint(wandb_group: str | None) -> str | None:
    """Say why W&B would refuse a group's name."""
    return _length_complaint(wandb_group)


def _length_complaint(name: str | None) -> str | None:
    wrong = name is not None and not 1 <= len(name) <= 128
    return "has to be of 1 to 128 characters, as W&B wants it." if wrong else None


def experiment_complaint(mlflow_experiment: str) -> str | None:
    """Say why MLflow would refuse an experiment's name."""
    fits = mlflow_experiment.strip() and len(mlflow_experiment) <= 500
    return None if fits else "has to be of 1 to 500 characters, as MLflow wants it."


def mlflow_tags_complaint(mlflow_tags: list[str]) -> str | None:
    """Say which tags are no name=value that MLflow takes."""
    for tag in mlflow_tags:
        name, equals, _ = tag.partition("=")
        if is_secret_name(name) or holds_key(tag):
            return f"has {name}, which looks like a secret, and settings are written down. Leave it out."
        if not equals or not MLFLOW_NAME.fullmatch(name):
            return f"has {tag!r}; expected name=value, the name of letters, digits and _ . - / :"
    return None


def store_complaint(mlflow_tracking_uri: str | None) -> str | None:
    """Say why runs cannot be kept at that place; passwords in it are not repeated, and not accepted."""
    if mlflow_tracking_uri is None:
        return None
    if WITH_PASSWORD.match(mlflow_tracking_uri):
        return (
            "has a user or password in it, and settings are written down. Leave them out and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    if is_url_with_secret(mlflow_tracking_uri):
        return "has a key in its query, and settings are written down. Leave it out and set MLFLOW_TRACKING_TOKEN."
    if NO_HOST.match(mlflow_tracking_uri):
        return f"is {mlflow_tracking_uri!r}, which names no host; expected https://host:port."
    if mlflow_tracking_uri.startswith(SCHEMES) or (mlflow_tracking_uri and FOLDER.match(mlflow_tracking_uri)):
        return None
    return (
        f"is {mlflow_tracking_uri!r}; expected a server (https://host:port), a folder, sqlite:///file or databricks. "
        "A database server is reached through `mlflow server`."
    )
