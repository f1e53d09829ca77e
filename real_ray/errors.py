"""Errors that a user can act on. Each message says what, where, the bound and what to do.

Everything below `UserError` is bad input: the command line prints it as one message and exits
with code 2. Everything below `RunError` ended a run that had started: exit code 1.
"""


class RealRayError(Exception):
    """Root of all errors of real-ray."""


class UserError(RealRayError, ValueError):
    """Bad input, found before anything was started."""


class ConfigError(UserError):
    """The configuration cannot be read or has a wrong value."""


class DataError(UserError):
    """A dataset is missing, empty or has a bad row."""


class ModelError(UserError):
    """A model or tokenizer cannot be found or loaded."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, or does not fit the configuration."""


class ResourceError(UserError):
    """The cluster does not have what the configuration asks for."""


class RunError(RealRayError, RuntimeError):
    """A started run cannot go on."""


class GroupError(RunError):
    """A rollout group is cut, merged or out of order."""


class GenerationError(RunError):
    """A generator could not produce a usable group."""


class GroupLostError(GenerationError):
    """The completions of a group have gone with the machine that held them."""


class RewardError(RunError):
    """A reward function raised, or returned something that is not one finite number a member."""


class StalenessError(RunError):
    """A group is older than `rollout.max_staleness` allows."""


class LedgerError(RunError):
    """A group was lost, or counted twice."""


class SyncError(RunError):
    """Generators do not hold the weights that the learner sent.

    Args:
        generators: names of those that are known to have failed; empty: it cannot be told.
    """

    def __init__(self, message: str, generators: tuple[str, ...] = ()) -> None:
        super().__init__(message, generators)  # both, so that it survives pickling
        self.generators = generators

    def __str__(self) -> str:
        return str(self.args[0])


class LearnerError(RunError):
    """An optimiser step failed, and would fail again."""


class LearnerLostError(RunError):
    """A learner rank died, failed or does not answer: the group of ranks has to be started anew."""


class GeneratorsLostError(RunError):
    """Fewer generators than `rollout.min_generators`, for too long or for good."""


class ActorDiedError(RunError):
    """A Ray actor or one of its processes has died."""


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a group of errors, such as an `asyncio.TaskGroup` raises."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def shown(value: object) -> str:
    """Return type and start of a value on one line, as messages show what they refuse."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"
