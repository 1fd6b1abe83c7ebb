"""From measured times to buckets: bucket_cap_mb="auto", and the profiles of `torchddp tune` and `simulate`."""
