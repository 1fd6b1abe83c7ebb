from benchmarks.torchft.cli import main

main()
