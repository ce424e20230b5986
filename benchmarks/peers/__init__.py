"""Other systems that cut convolutional networks over ranks, on the benchmarks' networks."""
