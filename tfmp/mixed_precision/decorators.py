"""What the scopes of precision decorate."""

import inspect


def refuse_all_but_functions(scope: str, function: object) -> None:
    """Refuse to decorate what is no function, or what runs only after the call.

    Args:
        scope: The name of the scope, for the error.
        function: What is to be decorated.

    Raises:
        TypeError: `function` cannot be called, or is a generator or a coroutine.

    Examples:
        >>> refuse_all_but_functions("tfmp.autocast", 3)
        Traceback (most recent call last):
            ...
        TypeError: tfmp.autocast decorates functions, got 3. A generator or a coroutine would run outside of the scope:
        enter the scope within it, with no yield or await inside.
    """
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{scope} decorates functions, got {function!r}. A generator or a coroutine would run outside of the "
            "scope: enter the scope within it, with no yield or await inside."
        )
