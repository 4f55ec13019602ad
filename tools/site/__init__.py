"""Hooks of MkDocs for the documentation site."""
