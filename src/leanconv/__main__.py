"""``python -m leanconv``: the command line."""

from leanconv.cli.main import main

if __name__ == "__main__":
    main()
