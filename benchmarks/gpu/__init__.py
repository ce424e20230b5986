"""Benchmarks on a GPU, and predictions for more GPUs than there are; run by `make gpu`.

On one rank: layers and networks beside plain torch, shards of wider cuts, what a step of them would
take with the links of larger machines, and where the host waits. On two ranks, which may share the
GPU: messages between them. The same code runs on a CPU, where tests do so with tiny cases.
"""
