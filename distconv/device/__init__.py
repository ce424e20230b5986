"""Everything that knows a kind of device; above it are devices of torch, and streams."""
