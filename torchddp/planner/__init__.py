"""From measured ready times and a measured transport to the bucket plan with the least exposed time."""
