"""Windows of convolution and pooling on cut planes."""
