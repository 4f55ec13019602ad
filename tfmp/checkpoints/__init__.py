"""Readers for what other systems, and older versions of tfmp, saved."""
