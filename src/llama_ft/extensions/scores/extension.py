"""Evaluations score answers with --score, and the end of a run asks the tasks of --eval_tasks."""

from llama_ft.door import Extension

EXTENSION = Extension(
    part="llama_ft.extensions.scores.part:FinalTasks",
    needs_part=lambda config: bool(config.train.eval_tasks),
    scores="llama_ft.extensions.scores.scoring:AnswerScores",
    needs_scores=lambda settings: bool(settings.score),
)
