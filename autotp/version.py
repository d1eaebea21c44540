"""The version, which all ranks must share."""

__version__ = "0.1.0"
