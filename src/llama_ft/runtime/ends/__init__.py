"""How a run ends: errors, lost ranks, signals, hangs and memory."""
