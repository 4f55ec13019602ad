"""Commands that measure tfmp."""
