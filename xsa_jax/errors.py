"""Errors that the entry points print as one line, in place of a traceback."""


class UserError(Exception):
    """An input of the user (config, file, checkpoint, environment) cannot be used. The message names it and says what to do."""


class ConfigError(UserError):
    """A config field is unknown, has the wrong type, or conflicts with another field."""
