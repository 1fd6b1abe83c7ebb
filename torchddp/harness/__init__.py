"""What benchmarks and the commands share: launches, models, tables, pages."""
