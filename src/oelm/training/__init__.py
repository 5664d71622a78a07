"""Training: one function for every task, its metrics, references, checkpoints and record."""
