"""What convolution and pooling share: two ways to apply windows to cut planes."""
