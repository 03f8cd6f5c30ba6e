"""The pictures of README and docs. `python docs/generate.py` draws them into docs/img from the
figures next to this file; plans.py renews the planner's figures."""
