"""`python -m brokerless.cli`: the command without its script."""

from brokerless.cli.main import main

main()
