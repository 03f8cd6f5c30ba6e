"""Read files, and turn their samples into one form."""
