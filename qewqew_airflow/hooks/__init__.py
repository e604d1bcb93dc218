"""The hook. A connection is a directory of queues and topics, with the settings to open them.

May import no other folder.
"""
