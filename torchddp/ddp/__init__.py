"""DistributedDataParallel: torch's module over the compiled reducer."""
