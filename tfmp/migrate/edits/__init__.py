"""The edits and findings that rules yield, and their application to the text of a script."""
