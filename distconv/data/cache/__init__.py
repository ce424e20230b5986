"""Samples that stay on the ranks that read them first, and move between ranks by messages.

The model is LBANN's data store: Jacobs et al., "Parallelizing training of deep generative models on
massive scientific datasets", CLUSTER 2019.
"""
