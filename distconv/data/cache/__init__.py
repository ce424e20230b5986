"""A cache of samples: each stays on the ranks that read it first, and reaches others by messages.

The model is LBANN's data store: Jacobs et al., "Parallelizing training of deep generative models on
massive scientific datasets", CLUSTER 2019.
"""
