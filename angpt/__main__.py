"""The start of the `angpt` command. Ctrl-C ends it quietly from the first import on."""

import sys


def main() -> None:
    try:
        from angpt.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
