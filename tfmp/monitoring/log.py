"""The log that monitors write to."""

import logging


def visible_logger() -> logging.Logger:
    """Return the library's logger, shown somewhere: whoever adds a monitor wants to read it.

    Its level becomes INFO unless the program gave it one of its own, and it writes to standard error where no handler
    is set up.

    Example:
        >>> visible_logger().name
        'tfmp'
    """
    logger = logging.getLogger("tfmp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger
