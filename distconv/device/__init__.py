"""Everything that depends on the kind of device; other floors use torch's devices and streams."""
