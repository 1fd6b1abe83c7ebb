"""Bucket sizes and plans tried out on the user's own model and group."""
