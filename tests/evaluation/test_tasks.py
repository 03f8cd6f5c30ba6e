import pytest

from llama_ft.errors import UserError
from llama_ft.evaluation.tasks import check_names

KNOWN = ["hellaswag", "mmlu", "mmlu_anatomy", "arc_easy", "arc_challenge"]


def test_names_and_patterns_that_are_there_pass() -> None:
    check_names(["hellaswag", "mmlu_*"], KNOWN)


def test_a_task_that_is_not_there_is_told_with_the_nearest_names() -> None:
    with pytest.raises(UserError) as refusal:
        check_names(["helaswag", "arc_eazy", "quarks", "nmlu_*"], KNOWN)
    assert [message.partition("no such task. ")[2] for message in refusal.value.messages] == [
        "Did you mean hellaswag?",
        "Did you mean arc_easy?",
        "A task of your own is named by its .yaml file.",
        "Did you mean mmlu?",
    ]
