"""Choosing a grid before there is one."""
