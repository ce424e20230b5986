"""Where samples come from: files of several formats, functions, torch's datasets."""
