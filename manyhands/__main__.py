"""`python -m manyhands` is the command line."""

from manyhands.cli import main

if __name__ == "__main__":
    main()
