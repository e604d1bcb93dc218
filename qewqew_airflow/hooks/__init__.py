"""The hook: a connection is a directory of queues and topics, which are opened with its settings.

May import no other folder.
"""
