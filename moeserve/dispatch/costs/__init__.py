"""What dispatchers cost by rows of a step: measured, kept and compared."""
