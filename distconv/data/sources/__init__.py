"""Sources of samples: files of several formats, functions, torch's datasets."""
