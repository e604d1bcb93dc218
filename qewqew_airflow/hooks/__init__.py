"""The hook: a connection is a directory of queues and topics, opened with its settings.

Imports arguments.
"""
