"""Plans buckets from measured times, for bucket_cap_mb="auto", `torchddp tune` and `torchddp simulate`."""
