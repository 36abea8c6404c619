"""The base class of this library's errors."""


class Error(Exception):
    """What the library refuses, where the refusal has a type of its own.

    Arguments that are out of range are plain ValueErrors and TypeErrors, as everywhere in Python.
    Each subclass is one of Python's own errors too, such as ValueError or OSError.
    """


class NotProved(Error, ValueError):  # noqa: N818
    """A claim that the kernel does not prove; the message says why."""


class ReleaseError(Error, RuntimeError):
    """A round that must not be released; nothing was, and the state is as it was."""
