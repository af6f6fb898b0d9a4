"""Processes of a service: who starts them, and what each consists of."""
