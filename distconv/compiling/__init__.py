"""Steps that are traced once, messages included, and replayed without what surrounds their work."""
