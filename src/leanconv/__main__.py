"""``python -m leanconv``, and the command ``leanconv``: the command line. Ctrl-C ends it while it is imported, too."""

import sys


def main() -> None:
    try:
        from leanconv.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
