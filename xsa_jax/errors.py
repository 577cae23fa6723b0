"""Errors that the entry points print as one line, in place of a traceback."""


class UserError(Exception):
    """Something the user gave (config, file, checkpoint, environment) cannot be used; the text says what and what to do."""


class ConfigError(UserError):
    """A config field that is unknown, of the wrong type, or impossible beside the others."""
