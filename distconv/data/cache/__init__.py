"""Samples that stay on the ranks that have read them, and travel between ranks by messages.

The data store of LBANN is the model: Jacobs et al., "Parallelizing training of deep generative
models on massive scientific datasets", CLUSTER 2019.
"""
