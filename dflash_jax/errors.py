"""Errors meant for users: each message is one sentence that says what was wrong and what would be right."""


class DflashError(Exception):
    """Base of every error this package raises on purpose. The command line prints it and exits with 2."""


class ConfigError(DflashError, ValueError):
    """A configuration, of a model or of a job, that cannot work."""


class CheckpointError(DflashError):
    """A checkpoint that is missing, incomplete or not what it claims to be."""


class TrainingError(DflashError):
    """A training run that cannot go on."""


class RequestError(DflashError, ValueError):
    """A request that can never be served."""


class StateError(DflashError, RuntimeError):
    """A state of an engine that cannot be used as it is asked for."""


class InvariantError(DflashError, AssertionError):
    """An engine invariant does not hold. The message begins with the invariant's name."""
