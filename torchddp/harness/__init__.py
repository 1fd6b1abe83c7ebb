"""Shared by benchmarks and commands: launching ranks, models, tables, pages."""
