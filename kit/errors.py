"""Exceptions whose message a person reads: what is wrong, where, and what to do next."""


class KitError(Exception):
    """The work cannot go on; the command line exits with 1."""

    exit_code = 1


class InputError(KitError):
    """A wrong call, such as an unknown key, a value out of range or a missing file; the command line exits with 2."""

    exit_code = 2


class SubmitError(KitError):
    """Slurm refused the job; the message contains Slurm's own."""
