"""The training run that all examples share: arguments, progress, checkpoints, metrics, logs."""
