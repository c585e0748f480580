"""`python -m xshard`: the command line, for when its script is not on the path."""

from xshard.cli.main import main

if __name__ == "__main__":
    main()
