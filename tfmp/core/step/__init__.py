"""One step: check, agree, apply or count, advance; and what users read of the steps."""
