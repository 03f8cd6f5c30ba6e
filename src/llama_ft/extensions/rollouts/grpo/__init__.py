"""--objective grpo: reinforcement learning from rounds of rollouts. objective.py is the objective,
training_rounds.py has the round of each step, batches.py makes micro-batches of it, and losses.py
the losses."""
