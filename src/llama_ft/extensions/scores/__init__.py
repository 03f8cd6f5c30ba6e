"""Scores of generated answers, for --score and --eval_tasks."""
