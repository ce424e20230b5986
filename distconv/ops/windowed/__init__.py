"""Two ways to apply the windows of convolution and pooling to cut planes."""
