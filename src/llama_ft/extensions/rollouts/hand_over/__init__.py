"""Hand the trained adapter over to servers, which sample with it: before each step of reinforcement
learning they load it under a new name, and a probe proves that they apply it."""
