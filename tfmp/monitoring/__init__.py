"""What shows the loss scale while a model trains."""
