"""The command that runs on a GPU what shows how tfmp does there, and writes a report: `python -m tools.gpu_report`."""
