"""Operands, arguments, types and checks, for the rules of all families."""
