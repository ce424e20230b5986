"""Steps that are traced once, messages included, and replayed without Python around their work."""
