"""ZeRO: each worker runs the optimizer on its shard of the parameters."""
