"""From measured times to buckets: bucket_cap_mb="auto", and `torchddp tune`."""
