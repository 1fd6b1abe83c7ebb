"""`python -m torchddp`: the `torchddp` command."""

from torchddp.cli import main

main()
