"""Carriers, which send and sum tensors between ranks: an interface, and a file per carrier."""
