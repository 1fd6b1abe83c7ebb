"""What moves tensors between ranks, and how ranks exchange values and agree."""
