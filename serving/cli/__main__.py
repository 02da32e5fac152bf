"""`python -m serving.cli`."""

from serving.cli import main

main()
