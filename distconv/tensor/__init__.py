"""DistTensor: a tensor of global shape of which every rank holds one box."""
