"""From measured times to buckets: bucket_cap_mb="auto", and what `torchddp tune` and `simulate` start from."""
