"""report.html: the self-contained HTML report of a run, on results and cost. Only part.py imports
torch."""
