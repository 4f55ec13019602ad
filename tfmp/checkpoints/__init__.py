"""Reading what other systems, and older versions, saved."""
