"""Plug-ins of model servers: one module each, which imports its server, so nothing else imports it."""
