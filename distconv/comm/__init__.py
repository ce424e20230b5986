"""Plans in motion: halo exchanges, redistributions and collectives, with their adjoints."""
