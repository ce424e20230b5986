"""Everything that depends on the kind of device; higher floors use torch's devices and streams."""
