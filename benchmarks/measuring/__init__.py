"""How benchmarks measure: networks, the best plain torch, memory, parts of a step, reports."""
