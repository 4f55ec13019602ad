"""What tfmp knows of each host: the frameworks whose optimizers it wraps."""
