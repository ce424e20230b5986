"""Warps: values of planes at positions that a tensor gives."""
