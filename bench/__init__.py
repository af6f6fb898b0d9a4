"""What is measured, beside whom, and how to run it again: `python -m bench.<room>.<bench>` from the root."""
