"""Packed sequences: samples of one sequence do not see each other."""
