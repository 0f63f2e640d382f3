"""The one exception that is meant for the person at the keyboard."""


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, what is allowed and what to do.

    The command line prints it as one line and leaves with code 2; in Python it is an ordinary ValueError.
    """
