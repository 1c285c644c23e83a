"""`python -m featcal` is the command line."""

from featcal.cli import main

main()
