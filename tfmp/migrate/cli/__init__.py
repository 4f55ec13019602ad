"""The command: it finds files, rewrites them and reports on them."""
