"""What an optimizer keeps between its steps, stored in half precision."""
