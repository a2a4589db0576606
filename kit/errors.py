"""Errors that a person reads: what is wrong, where, and what to do next."""


class KitError(Exception):
    """Something was found that stops the work; the command line exits 1."""

    exit_code = 1


class InputError(KitError):
    """A wrong call: an unknown key, a value out of range, a file that is not there; exits 2."""

    exit_code = 2


class SubmitError(KitError):
    """Slurm refused the job; the message holds Slurm's own words."""
