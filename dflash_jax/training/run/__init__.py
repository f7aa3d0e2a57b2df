"""A training run: its setup, step, loop, checkpoints, evaluation and metrics."""
