"""Every exception the method raises. The service translates them to HTTP in one place (``server/errors.py``)."""

from __future__ import annotations


class UnbindError(Exception):
    """Base of all errors here; the message names what is wrong and the remedy."""


class UnsupportedArchitecture(UnbindError):
    """The model's decoder layers or its token mixing cannot be handled; the message says what to do instead."""


class DataError(UnbindError):
    """A forget or retain row that cannot be used; the message names the file, line and field."""


class RowsTooShort(DataError):
    """No row has as many lexemes as a protected run."""


class FittingError(UnbindError):
    """The statistics do not define a module: degenerate covariance, no activation, no gradient."""


class TooLarge(UnbindError):
    """A fit that would take more memory or disk than there is; the message says how much, and what to do."""


class InsufficientRows(FittingError):
    """Too few rows for the partitions; the message says how many are needed."""


class ModuleFileError(UnbindError):
    """A module file that is damaged, hand-edited, of an unknown format version or not a module at all."""


class GuardFileError(UnbindError):
    """A guard's file that is damaged, of another format, or made under another key."""


class ModelMismatch(ModuleFileError):
    """A module of one model offered to another: the fingerprints differ."""


class UnknownModule(UnbindError):
    """A module name that is not in the bank; the message lists near names."""


class Cancelled(UnbindError):
    """Raised from a progress callback to stop long work between two batches."""
