"""The `angpt` command, called from tests."""

from angpt.cli.main import main


def call(capsys, *args):
    """Its exit code, what it printed and what it said of errors."""
    code = 0
    try:
        main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


def angpt(capsys, *args):
    """Its exit code and all its words, wherever the lines break."""
    code, out, err = call(capsys, *args)
    return code, " ".join((out + err).split())
