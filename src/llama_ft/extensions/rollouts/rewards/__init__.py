"""Rewards of answers: flags.py has the settings, pool.py the processes that call users' functions, and
worker.py is what runs in them."""
