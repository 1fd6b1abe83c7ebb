"""What moves tensors between ranks, and what ranks tell each other."""
