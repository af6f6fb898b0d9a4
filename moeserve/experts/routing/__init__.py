"""Routing, from router logits to slots: gates, routing methods, replica choice, load and the address book."""
