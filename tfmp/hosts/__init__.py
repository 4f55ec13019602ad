"""The frameworks whose optimizers tfmp wraps: for each a front-end, and how its optimizers take a step."""
