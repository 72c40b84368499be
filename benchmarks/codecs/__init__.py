"""Speed, error and memory of single codecs."""
