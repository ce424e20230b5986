"""Variational autoencoders of image and video generators, decoded in blocks without seams."""
