"""The one exception that is meant for the person at the keyboard."""


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, what is allowed and what to do.

    The command line prints it as one line and leaves with code 2; in Python it is an ordinary ValueError.
    """


def missing_package(problem: str, extra: str, *packages: str) -> UserError:
    """An error for a package that is not installed, with the command that installs the extra it belongs to."""
    words = " ".join((f"'.[{extra}]'", *packages))
    return UserError(f"{problem}, in a clone of twoscale run: pip install -c constraints.txt -e {words}")


class ProcessLost(Exception):
    """Another process of a run has ended, or cannot be reached any more: the same command goes on where the run was."""
