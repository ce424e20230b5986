"""Element-wise functions, products, and functions along one dimension."""
