"""`python -m ease` is the command `ease`."""

from ease.cli import main

if __name__ == "__main__":  # processes that train shadows import this file too
    main()
