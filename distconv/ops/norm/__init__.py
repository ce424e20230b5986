"""Batch, group, instance, layer and root-mean-square norm over partitioned dimensions."""
