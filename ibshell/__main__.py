"""`ibshell`: the version at once, everything else through the command groups."""

import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from fedpool import __version__

        print(f"ibshell {__version__}")
        return
    from ibshell.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
