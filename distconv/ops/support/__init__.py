"""Operands, arguments, types and checks that the rules of all families of functions share."""
