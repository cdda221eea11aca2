"""The errors that a user can cause. Each names the field, the value and the limit."""


class ConfigError(ValueError):
    """A configuration that cannot work; raised before anything is built.

    Attributes:
        field: the option's name as in `EngineConfig`, or None when several are at fault.
        limit: the largest value of the option that would work, where that is known.
    """

    def __init__(self, message: str, *, field: str | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.limit = limit


class InvalidRequest(ValueError):
    """A request that the engine refuses; nothing was changed by it.

    Attributes:
        parameter: the offending parameter as the caller spelled it, or None for the request as a whole.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, of an unknown architecture, or whose tensors do not fit."""


class OutOfDeviceMemory(RuntimeError):
    """The device had less memory left than weights, cache and steps need; the device's own error is chained."""


class ProfilerError(RuntimeError):
    """A trace that was started while one runs, stopped while none does, or could not be written."""


class EngineClosed(RuntimeError):
    """The engine was closed, or its step loop died; the cause is chained."""


class WeightUpdateError(InvalidRequest):
    """Weights that the engine refuses, or cannot name as asked; it goes on with those that it has.

    Attributes:
        parameter: the first parameter at fault, as the caller spelled it, or the argument.
    """


class EngineStateError(RuntimeError):
    """A call that the engine cannot serve as it is now: asleep, paused with requests, or without weights.

    The message says which call has to come first; nothing was changed.
    """
