"""Images of samples: which forms they have, their files, and text in which they have tokens."""
