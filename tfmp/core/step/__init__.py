"""One step: check, agree, apply or count, advance; also the properties in which users see the results of steps."""
