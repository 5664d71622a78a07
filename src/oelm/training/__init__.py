"""Training: one function for every task, its steps, evaluations, checkpoints and record."""
