"""Rollouts: answers to prompts with their token ids, log-probabilities, seeds and rewards, written in
rounds to a directory."""
