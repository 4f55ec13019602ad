"""What the scopes of precision decorate."""

import inspect


def refuse_all_but_functions(scope: str, function: object) -> None:
    """Refuse to decorate what is no function, or what runs only after the call. `scope` is the name for the error."""
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{scope} decorates functions, got {function!r}. A generator or a coroutine would run outside of the "
            "scope: enter the scope within it, with no yield or await inside."
        )
