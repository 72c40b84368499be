"""Compressed collectives of sharded models: FSDP, tensor and model parallelism."""
