"""Compiles codecs and train steps for TPUs and GPUs that are not here."""
