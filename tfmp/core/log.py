"""The logger that the monitors write to."""

import logging


def visible_logger() -> logging.Logger:
    """Return the logger "tfmp", and make sure that its messages of level INFO are visible.

    A user who adds a monitor wants to read its reports. So the level of the logger becomes INFO unless the program has
    set one. If no handler would receive the messages, they go to standard error.
    """
    logger = logging.getLogger("tfmp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger
