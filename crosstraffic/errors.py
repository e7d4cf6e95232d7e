"""One tree of errors; each knows the exit code of the command line."""


class CrosstrafficError(Exception):
    """Root of the errors that a user can act on."""

    exit_code = 1


class UsageError(CrosstrafficError):
    """What was asked cannot be: a wrong value, name, file or combination."""

    exit_code = 2


class EnvironmentRefused(CrosstrafficError):
    """The machine or the launch cannot give a trustworthy measurement."""

    exit_code = 3


class RunFailed(CrosstrafficError):
    """Something was measured, and a check failed or the run is incomplete."""

    exit_code = 1
