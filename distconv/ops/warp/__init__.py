"""Warps: the values of planes at positions that a tensor gives (F.grid_sample, F.affine_grid)."""
