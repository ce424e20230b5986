"""What the rules of all families need: operands, arguments, types and checks."""
