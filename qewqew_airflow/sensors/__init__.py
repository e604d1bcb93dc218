"""The sensor: it waits until a queue, or a reader of a topic, is worth a batch.

Imports hooks, shared, links and triggers.
"""
