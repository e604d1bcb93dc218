"""What works on queues and topics from outside: which a path is, putting, tail, dump, export, replay, DiskQueue's files.

It may import all of the core but `cli`.
"""
